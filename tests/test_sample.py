"""Generation: the cache changes nothing, the seed decides everything, and sample.py reads what training leaves."""

import subprocess
import sys

import pytest
import torch
from harness import ROOT, logits_of, run_ranks, toy_files, train

from checkpoint import steps
from export import find_checkpoint, to_hf
from sample import Config, forward_cached, generate, load_model, new_cache
from support import prepare
from support.flags import UserError

CPU = torch.device("cpu")
ALL = torch.arange(300)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """text/ (bytes, 20 steps) and ids/ are run folders; the model has 300 ids, the bytes 257."""
    folder = tmp_path_factory.mktemp("runs")
    toy_files(folder, vocab_size=300)
    (folder / "corpus.txt").write_text("".join(f"Zeile {i}: häßlich ist {i * i}.\n" for i in range(300)))
    prepare.prepare(str(folder / "corpus"), [str(folder / "corpus.txt")])
    flags = dict(dtype="float32", steps=20, lr=1e-2, save_every=10)
    run_ranks(
        1, train, "train_ddp", str(folder), {"text": flags | {"data": f"{folder}/corpus"}, "ids": flags | {"steps": 1}}
    )
    yield folder


@pytest.fixture(scope="module")
def model(runs):
    return load_model(find_checkpoint(runs / "text"), torch.float64, CPU)


def test_cache_changes_no_logit(model):
    ids = torch.randint(300, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        whole = logits_of(model, torch.tensor([ids]))[0]  # (32, 300)
    cache, past = new_cache(model), 0
    for T in (5, 1, 3, *[1] * 23):  # a prompt, then pieces of any length, to the end of the context
        logits = forward_cached(model, ids[past : past + T], cache, past)
        past += T
        torch.testing.assert_close(logits, whole[past - 1], rtol=0, atol=1e-12)
    assert past == 32


def test_greedy_text_is_the_uncached_models(model):
    """Over two ends of the context of 32: there the newer half is read again."""
    ids, context = [1, 2, 3], [1, 2, 3]
    with torch.no_grad():
        for _ in range(60):
            context = ids[-16:] if len(context) > 32 else context
            context, ids = (
                seq + [int(logits_of(model, torch.tensor([context]))[0, -1].argmax())] for seq in (context, ids)
            )
    assert list(generate(model, [1, 2, 3], Config(tokens=60, temperature=0), ALL, None)) == ids[3:]
    long = list(range(100))  # a prompt longer than the context counts with its end
    assert [*generate(model, long, Config(tokens=9), ALL, None)] == [
        *generate(model, long[-16:], Config(tokens=9), ALL, None)
    ]


def test_draws(model):
    def draw(**flags):
        return list(generate(model, [1], Config(**{"tokens": 40, "temperature": 3.0, "top_k": 0} | flags), ALL, None))

    assert draw() == draw() and draw() != draw(seed=2)
    assert draw(top_k=1) == draw(temperature=0.0) == draw(temperature=1e-6) != draw()
    assert max(draw()) >= 257  # untrained ids do come up where they are allowed
    some = torch.tensor([3, 70, 256])
    drawn = [list(generate(model, [1], Config(tokens=100, temperature=100.0, seed=s), some, 256)) for s in range(10)]
    assert set(sum(drawn, [])) == {3, 70} and max(map(len, drawn)) < 100  # 256 is the end, and is not part of the text
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="logits after 1 tokens are not finite"):
        draw()


def test_distribution(runs):
    """First tokens over many seeds follow softmax(logits / temperature) of the top k."""
    model = load_model(find_checkpoint(runs / "text"), torch.float32, CPU)
    logits = forward_cached(model, [65], new_cache(model), 0).double()
    top, places = logits.topk(3)
    t = float(top[0] - top[2]) / 2  # e^2 between the first and the third: the temperature shows
    expected = (top / t).softmax(0)
    drawn = [next(generate(model, [65], Config(seed=s, temperature=t, top_k=3), ALL, None)) for s in range(600)]
    counts = torch.tensor([drawn.count(int(place)) for place in places]) / 600
    assert counts.sum() == 1 and (counts - expected).abs().max() < 4 * (0.25 / 600) ** 0.5, (counts, expected, t)


def run(*words):
    done = subprocess.run([sys.executable, str(ROOT / "sample.py"), *map(str, words)], capture_output=True, timeout=120)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_command_line(runs):
    flags = ("--prompt", "Zeile ä", "--tokens", "60", "--temperature", "4", "--top-k", "0")
    code, text, errors = run(runs / "text", *flags)  # so hot that ids over the tokenizer's 256 would come up
    assert (code, errors) == (0, "") and text.startswith("Zeile ä") and len(text) > 20
    assert run(steps(runs / "text/ckpt")[-1], *flags) == (
        0,
        text,
        "",
    )  # the newest step is what a run folder means; same seed, same text
    assert run(steps(runs / "text/ckpt")[0], *flags)[1] != text
    to_hf(find_checkpoint(runs / "text"), runs / "hf", "float32")
    assert run(runs / "hf", *flags) == (0, text, "")
    code, text, _ = run(runs / "ids", "--prompt", "5 6 7", "--tokens", "12")
    assert code == 0 and len(text.split()) == 12 and all(0 <= int(word) < 300 for word in text.split())


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["{}/ids", "--prompt", "5 300"],
            "no tokenizer is known for {}/ids/ckpt/step_00000001: --prompt takes ids from 0 to 299",
        ),
        (["{}/corpus.txt"], "{}/corpus.txt is no run folder, no checkpoint"),
    ],
)
def test_errors(runs, words, message):
    code, text, errors = run(*[word.format(runs) for word in words])
    assert code == 2 and errors.startswith("error: " + message.format(runs)) and errors.count("\n") == 1 and not text
