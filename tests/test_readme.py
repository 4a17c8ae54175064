"""What the front page and docs/ say is so: commands parse, links lead somewhere, figures are those of their sources."""

import importlib
import json
import math
import re
import shlex

import pytest
from harness import ROOT
from torch.distributed.run import get_args_parser

import plan
from cost import machine
from support.flags import parse_flags

PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("running.md", "from.md", "trouble.md"))]
README = (ROOT / "README.md").read_text()


def commands(text: str) -> list[list[str]]:
    """Every `python ...`, `torchrun ...` in an indented block or between backticks, as words."""
    found = re.findall(r"^    ((?:python|torchrun) .*)$", text, re.M) + re.findall(
        r"`((?:python|torchrun) [^`]+)`", text
    )
    return [shlex.split(line, comments=True) for line in found if ".py" in line and "..." not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    """torchrun takes its part, and the script's own flags the rest; other tools exist."""
    for words in commands(page.read_text()):
        if words[0] == "torchrun":
            args = get_args_parser().parse_args(words[1:])
            script, flags = args.training_script, args.training_script_args
        else:
            script, *flags = words[1:]
        assert (ROOT / script).is_file(), words
        module = importlib.import_module(script.removesuffix(".py").replace("/", ".")) if "/" not in script else None
        if script.startswith(("train_", "plan")):
            drawn = [flag for flag in flags if flag not in ("--draw", "--try")]
            parse_flags(module.Config, drawn)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for name in re.findall(r"\btests/forks/\w+\.patch", text):
        assert (ROOT / name).exists()


def test_a_fork_has_as_many_lines_as_is_said():
    said = re.findall(r"git apply (\S+) +# .*?: (\d+) lines of (\w+\.py)", README)
    assert len(said) == 3
    for patch, lines, file in said:
        text = (ROOT / patch).read_text()
        assert len(re.findall(r"^\+(?!\+)", text, re.M)) == int(lines) and f"+++ b/{file}\n" in text, patch


def test_it_stays_one_page():
    assert len(README.splitlines()) <= 110


def test_the_reading_order_has_the_files_lengths():
    """Within ten lines: minutes are meant, not a count."""
    lengths = re.findall(r"(\w+\.py) +\(?(\d+)(?: lines|\))", README)
    assert len(lengths) >= 12
    for name, length in lengths:
        assert abs(len((ROOT / name).read_text().splitlines()) - int(length)) <= 10, name


def test_which_one_is_what_plan_says():
    """Each row's GB are those of its command, and plan would take that command too."""
    rows = re.findall(
        r"^\| (\d) cards? of (\d+) GB(?:, (\d+) GB of host memory)? \| `(\w+)` \| `(.*?)` \| (.*) \|$", README, re.M
    )
    assert len(rows) == 6
    for gpus, memory, host, model, command, gb in rows:
        box = machine("", float(memory), int(gpus))
        cfg = plan.Config(model=model, gpus=int(gpus), gpu_mem=float(memory), host_mem=float(host or math.inf))
        _, take = plan.plan(cfg, box)
        assert gb == f"{take.gb:.1f} of {box.room / 1e9:.1f}", command
        assert [word.replace("=", " ") for word in take.command(box)[1:] if word.startswith("--")] == re.findall(
            r"--[\w-]+[= ]\S+", command.replace("=", " ")
        )


def test_results_are_rows_of_docs_results():
    rows = json.loads((ROOT / "docs/results/6b-h200x2.json").read_text())
    table = re.findall(r"^\| ([^|]+) \| (\d) \| (\d+) x (\d+) \| ([\d,]+) \|.*\| ([\d.]+) \| (\w+) \|$", README, re.M)
    assert len(table) == 8
    for _, gpus, micro, accum, rate, peak, commit in table:
        wanted = int(gpus), int(micro), int(accum), int(rate.replace(",", ""))
        found = [r for r in rows if (r["gpus"], r["micro_batch"], r["accum"], round(r["tok_s_gpu"])) == wanted]
        assert any(r["commit"].startswith(commit) and abs(r["peak_gb"] - float(peak)) < 0.06 for r in found), wanted


def test_the_timeline_is_what_draw_prints():
    from support.timeline import draw
    from train_pipe import schedule

    lines = draw(schedule, "1f1b", 4, 8).splitlines()[1:]
    for line in lines:
        assert line.split("  holds")[0].strip() in README


def test_every_scenario_has_its_test():
    """docs/scenarios.md: each name behind a file's is a test of that file."""
    rows = re.findall(r"^\| ([A-I]\d+) \| .* \| (.*) \|$", (ROOT / "docs/scenarios.md").read_text(), re.M)
    assert len(rows) > 95
    for scenario, tests in rows:
        if tests.startswith("there are no"):
            continue
        for part in re.sub(r"\([^)]*\)", "", tests).split(";"):
            file, names = part.split(":")
            text = (ROOT / f"tests/test_{file.strip()}.py").read_text()
            for name in names.split(","):
                assert f"def test_{name.strip()}(" in text, (scenario, name)
