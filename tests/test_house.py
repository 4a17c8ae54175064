"""How the files hang together: imports run one way, support/ serves and knows no script, a run loads what it uses."""

import ast
import json
import os
import subprocess
import sys

import pytest
from harness import ROOT, toy_files

FILES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]
}
SCRIPTS = sorted(name for name in FILES if name.startswith("train_"))


def imported(path) -> set[str]:
    """Names of our files that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inside or {node.module}
    return found & FILES.keys()


GRAPH = {name: imported(path) for name, path in FILES.items()}


def circle(name: str, above: tuple[str, ...] = (), done: set[str] | None = None) -> tuple[str, ...]:
    """The first circle of imports met from this file on, () if there is none."""
    done = set() if done is None else done
    if name in above:
        return (*above[above.index(name) :], name)
    if name not in done:
        for other in sorted(GRAPH[name]):
            if found := circle(other, (*above, name), done):
                return found
        done.add(name)
    return ()


def test_imports_run_one_way():
    """No circle, none that a function or TYPE_CHECKING hides."""
    assert len(FILES) > 20 and "support.run" in GRAPH["support.start"]
    done: set[str] = set()
    assert not [" -> ".join(found) for name in sorted(FILES) if (found := circle(name, (), done))]
    for name, path in FILES.items():
        assert "TYPE_CHECKING" not in path.read_text(), name


def test_support_knows_no_script():
    for name in FILES:
        if name.startswith("support."):
            assert not GRAPH[name] & {*SCRIPTS, "plan"}, name


def loaded(*call: str) -> set[str]:
    """Modules that Python has loaded when the script of this command line has run."""
    end = "import atexit, runpy, sys; atexit.register(lambda: print('LOADED', *sys.modules, file=sys.stderr)); "
    end += f"sys.argv = sys.argv[1:]; sys.path[0] = {str(ROOT)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    env = os.environ | {"LOCAL_WORLD_SIZE": "8"}  # one thread
    done = subprocess.run([sys.executable, "-c", end, *call], capture_output=True, text=True, timeout=100, env=env)
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    assert done.returncode == 0 and len(lines) == 1, done.stderr
    return set(lines[0].split())


def small_run(folder, *more: str) -> list[str]:
    flags = {"--model": folder / "toy.json", "--data": folder / "plain", "--out": folder / "run", "--device": "cpu"}
    flags |= {"--global-batch": 12, "--steps": 2, "--eval-every": 0}
    return [str(word) for pair in flags.items() for word in pair] + list(more)


def test_the_ring_needs_six_files():
    names = loaded(str(ROOT / "ring_allreduce.py"), "--help")
    ours = {name for name in names if name in FILES or name == "support"}
    assert ours == {"support", "support.flags", "support.run", "support.rendezvous", "support.meter"}
    assert "tiktoken" not in names


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_loads_what_its_run_uses(script, tmp_path):
    toy_files(tmp_path)
    asked_for = {"deepspeed_json", "export", "support.prepare", "support.bench_table", "sample", "tiktoken"}
    names = loaded(str(ROOT / f"{script}.py"), *small_run(tmp_path))
    assert not names & asked_for
    assert "support.resume" in names and (tmp_path / "run/log.jsonl").exists()


def test_what_is_asked_for_is_loaded(tmp_path):
    """The same look sees the DeepSpeed reader and the tokenizers where a run does use them."""
    toy_files(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 12}))
    names = loaded(
        str(ROOT / "train_zero.py"), *small_run(tmp_path, "--deepspeed", str(tmp_path / "ds.json"), "--explain")
    )
    assert "deepspeed_json" in names and "tiktoken" not in names
    assert {"export", "support.prepare", "tiktoken"} <= loaded(str(ROOT / "sample.py"), "--help")
