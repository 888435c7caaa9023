"""What a command line says of a run: its defaults, its sizes, its name."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baselines
import gn
import model
import recipe


def test_what_is_saved_as_config_is_what_is_run(here):
    """Defaults that depend on other flags are resolved; tuned ones go with what they belong to."""

    def value(name, *line):
        return recipe.configure(["--model", "tiny", *line]).values[name]

    assert value("average", "--method", "gn") == 0
    assert value("average", "--method", "gn_prox") == 0.99
    assert value("average", "--method", "gn_prox", "--line-search", "5") == 0
    assert value("average", "--method", "gn_prox", "--alphas", "1 0.5") == 0
    muon = ["--method", "muon"]
    assert value("average", *muon) == 0.4 and value("warmup_steps", *muon) == 6
    assert value("average", *muon, "--schedule", "cosine") == 0
    assert value("warmup_steps", *muon, "--schedule", "cosine") == 0
    assert value("warmup_steps", *muon, "--warmup", "0.2") == 0
    assert value("warmup", *muon, "--warmup", "0.2") == 0.2


def test_steps_or_tokens_or_the_target_say_how_long_a_run_is():
    """A default counts only where none of them is given; --steps comes before --tokens."""

    def length(*line):
        values = recipe.configure(["--model", "tiny", "--method", "muon", *line]).values
        return values["steps"], values["tokens"]

    target = ["--target-loss", "2"]
    assert length() == (10, None)
    assert length("--tokens", "2m") == length("--tokens", "2m", *target) == (15, 2_000_000)
    assert length("--steps", "7", "--tokens", "2m") == length("--steps", "7") == (7, None)
    assert length("--steps", "7", *target) == (7, None)
    assert length(*target) == (None, None)
    endless = recipe.configure(["--model", "tiny", "--method", "muon", *target])
    assert 2**31 - endless.batches_per_step <= endless.total_batches < 2**31


@given(
    st.sampled_from([*gn.SCHEDULES]),
    st.sampled_from([*baselines.SCHEDULES]),
    st.sampled_from([0.0, 0.2]),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(0, 4),
)
def test_depends_on_length_is_what_the_learning_rate_does(gn_schedule, schedule, warmup, N, t, k):
    """Where it is false, runs of 10, 11 and endlessly many steps have the same learning rates."""
    rates = {"gn": [], "muon": []}
    for steps in (10, 11, recipe.NO_END):
        settings = gn.Config(model.Config(), N, steps, schedule=gn_schedule, warmup=warmup)
        rates["gn"].append(float(gn.learning_rate(t, min(k, N - 1), settings)))
        muon = baselines.Muon(model.Config(), N, steps, schedule=schedule, warmup=warmup)
        rates["muon"].append(float(baselines.learning_rate(t, muon)))
    for name, config in {"gn": settings, "muon": muon}.items():
        assert config.depends_on_length or len(set(rates[name])) == 1


def test_a_method_that_does_not_say_whether_it_depends_on_its_length_does():
    """As one that a user has added."""
    nothing_said = "the method's Config has no depends_on_length"
    assert recipe.why_length_counts(object()) == nothing_said
    assert recipe.why_length_counts(SimpleNamespace(warmup=0.1, schedule="x")) == nothing_said
    assert (
        recipe.why_length_counts(SimpleNamespace(depends_on_length=True))
        == "the method's Config says so"
    )
    assert recipe.why_length_counts(SimpleNamespace(depends_on_length=False)) is None


def test_the_warm_up_depends_on_the_network_and_the_inner_batch_only():
    """By default it is 5% of 20 tokens per parameter, in whole inner batches (Section 5)."""

    def warm_up(*line):
        return recipe.configure(["--model", "tiny", *line]).values["warmup_tokens"]

    for line in ([], ["--steps", "99"], ["--tokens", "9m"], ["--batch", "4096"]):
        assert warm_up(*line) == warm_up(*line, "--method", "muon") == 132_096
    assert warm_up("--inner-batch", "32") == 32 * 4096
    assert warm_up("--d-ff", "512") > 132_096
    assert warm_up("--warmup-tokens", "0") == 0


def test_a_run_is_named_by_its_flags(here):
    """Not by the code. The same flags in another order are the same run, other ones another."""

    def folder(*line):
        return recipe.configure(["--model", "tiny", *line]).config.out

    assert folder("--seed", "1", "--lr", "0.1") == folder("--lr", "0.10", "--seed=1")
    assert folder("--seed", "1") != folder("--seed", "1", "--clip", "2")
    # When it is saved changes no number.
    assert folder("--seed", "1") == folder("--seed", "1", "--save-every", "2")
    # A length is part of it only where the learning rate depends on it. Its tokens never are.
    muon = ["--method", "muon"]
    assert folder(*muon) == folder(*muon, "--steps", "99") == folder(*muon, "--tokens", "99m")
    assert folder(*muon) != folder(*muon, "--target-loss", "2")
    cosine = [*muon, "--schedule", "cosine"]
    assert folder(*cosine, "--steps", "9") != folder(*cosine, "--steps", "8")
    assert folder(*cosine, "--steps", "15") == folder(*cosine, "--tokens", "2m")


def test_step_sizes_of_no_line_search_are_refused(here):
    with pytest.raises(ValueError, match="line_search 0 is no search, but alphas has"):
        recipe.configure(["--model", "tiny", "--line-search", "0", "--alphas", "1 0.5"])


def test_two_ways_to_say_the_warm_up_are_not_taken_at_once(here):
    both = ["--warmup", "0.1", "--warmup-steps", "2"]
    with pytest.raises(ValueError, match="warmup and warmup_steps are two ways"):
        recipe.configure(["--model", "tiny", "--method", "soap", *both])


def test_the_paper_sizes():
    """Section 5: 4M tokens in inner batches of 32 x 1024 are N = 122 inner steps."""
    r = recipe.configure(
        [
            "--model",
            "45m",
            "--data",
            "stdlib",
            "--tokenizer",
            "bytes",
            "--batch",
            "4m",
            "--tokens",
            "900m",
        ]
    )
    assert (r.settings.inner_steps, r.config.batch, r.config.steps) == (122, 122 * 32 * 1024, 225)
    assert r.warmup_batches == round(r.parameters / 32768)  # 5% of 20 tokens per parameter


@pytest.mark.parametrize(
    "words, vocab_size",
    [
        ("--model tiny", 256),
        ("--model 5m", 2048),
        ("--model 45m", 32_000),
        ("--model 5m --tokenizer gpt2", 2048),
        ("--model 5m --tokenizer bytes", 0),
        ("--model tiny --tokenizer gpt2", 0),
        ("--model 5m --tokenizer gpt2 --vocab-size 4096", 4096),
        ("--model 5m --vocab-size 0", 0),
    ],
)
def test_the_vocabulary_of_a_model_goes_with_its_tokenizer(words, vocab_size):
    """Of another tokenizer, all ids are taken, which is what 0 means."""
    values, _ = recipe.parse(words.split())
    assert values["vocab_size"] == vocab_size


@pytest.mark.parametrize(
    "name, heads, inner_batch, tokens",
    [("45m", 8, 32, 900_000_000), ("150m", 16, 128, 3_000_000_000)],
)
def test_the_papers_settings(name, heads, inner_batch, tokens):
    """Section 5, Appendix E and H: what `--model 45m` and `--model 150m` mean for every method."""

    def configured(method):
        line = ["--model", name, "--data", "stdlib", "--tokenizer", "bytes", "--method", method]
        return recipe.configure(line)

    def has(settings, **expected):
        assert {key: getattr(settings, key) for key in expected} == expected

    run = configured("gn")
    has(run.network, n_heads=heads, n_kv_heads=heads, mlp="gelu", qk_norm=True, context=1024)
    has(run.config, inner_batch=inner_batch, tokens=tokens, steps=round(tokens / run.config.batch))
    has(run.config, warmup_lr=0.002)
    warmup_tokens = 0.05 * 20 * run.parameters
    assert abs(run.config.warmup_tokens - warmup_tokens) <= run.inner_tokens / 2
    assert recipe.DEFAULTS[name]["batch"] == 4_000_000
    has(run.settings, lr=0.01, schedule="constant+inner cosine", momentum=0.95, inner="muon")
    has(run.settings, weight_decay=0.001, clip=1.0, damping=0.0)
    has(run.settings, line_search=5, guard=True, average=0.0)
    prox, layerwise = configured("gn_prox").settings, configured("layerwise_gn").settings
    has(prox, schedule="global cosine", line_search=0, average=0.999)
    has(layerwise, schedule="constant+inner cosine", line_search=10, objective="quadratic")
    has(configured("adamw").settings, lr=0.003, b1=0.9, b2=0.95)
    has(configured("muon").settings, lr=0.03, momentum=0.95)
    has(configured("soap").settings, lr=0.03, b1=0.9, b2=0.9, frequency=1)
