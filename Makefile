# Everything sets itself up: a fresh clone needs `make train` or `make test` and nothing before it.
#
#     make train     install, prepare the corpus, train `tiny` with 2 processes (or one per GPU), evaluate, save, sample
#     make test      install, ruff, the test suite
#     make proof     every layout against plain torch, every checkpoint under every layout: half an hour, docs/PROOF.md
#     make mutants   small faults, one at a time: which test turns red? into docs/PROOF.md too
#     make soak      the long tests that `make test` leaves out
#     make smoke     this machine: every strategy for a few steps, on two GPUs if there are two
#     make clean     remove the environment and what tools left; runs/ and corpus/ stay
#
# A torch that $(PYTHON) can import already (a CUDA image's own) is used as it is, and so is what else is there: .venv is then a
# layer over that Python, and where nothing is missing make needs no network.

PYTHON ?= python3
# test files at a time: much of a test is waiting for processes to start
WORKERS ?= $(shell echo $$(( $$(nproc) < 8 ? $$(nproc) : 8 )))
RUN := .venv/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install -c .venv/pins
TOOLS := $(shell sed -n '/^test = /s/[^[]*\[\|[],"]//gp' pyproject.toml)

# torchrun's own default, without its warning; the scripts share out the cores themselves
export OMP_NUM_THREADS := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: train test proof mutants soak smoke clean

# 24, the global batch of tiny, is to divide by the number of processes
train: .venv/ready
	@n=$$($(RUN) -c 'import torch; print(next(n for n in range(torch.cuda.device_count() or 2, 0, -1) if 24 % n == 0))') && \
	set -x && \
	$(RUN) -m torch.distributed.run --standalone --nproc_per_node=$$n train_ddp.py --model tiny --out runs/first && \
	$(RUN) sample.py runs/first --prompt 'def ' --tokens 400

test: .venv/ready-to-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(RUN) -m pytest -q -p xdist.plugin -n $(WORKERS) --dist loadfile -m 'not soak'

proof: .venv/ready-to-test
	$(RUN) tests/proof.py

mutants: .venv/ready-to-test
	$(RUN) tests/mutants.py

soak: .venv/ready-to-test
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(RUN) -m pytest -q -m soak

smoke: .venv/ready
	PYTHON=$(RUN) ./smoke.sh

# The stamps are touched last, so an installation that was cut short goes on; the second time nothing is installed. Of the two last
# calls of pip the first asks only whether all is there.
.venv/ready: requirements.txt constraints.txt
	$(PYTHON) -m venv .venv || $(PYTHON) -m venv --without-pip .venv  # no ensurepip (Debian): pip may come with the layer below
	if $(PYTHON) -c 'import torch; assert [*map(int, torch.__version__.split(".")[:2])] >= [2, 11]' 2>/dev/null; then \
	    echo 'using the torch that $(PYTHON) has'; \
	    : >.venv/pins; \
	    $(PYTHON) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	        >$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth; \
	else cp constraints.txt .venv/pins; fi
	$(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || : >.venv/pins
	$(PIP) 'pip>=23'
	$(PIP) --no-index --no-deps -r requirements.txt >/dev/null 2>&1 || $(PIP) -r requirements.txt
	touch $@

.venv/ready-to-test: .venv/ready pyproject.toml
	$(PIP) $(TOOLS)
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache __pycache__ tests/__pycache__
