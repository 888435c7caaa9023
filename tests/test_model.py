"""The network against a transcription in NumPy; its sizes, its loss and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, VARIANTS, logits, random_params, random_tokens

import baselines
import model

VALUE_AND_GRAD = jax.jit(baselines.value_and_grad, static_argnums=2)  # by backpropagation


@pytest.mark.parametrize("preset, count", [("45m", 45_363_712), ("150m", 134_142_720)])
def test_parameter_count_is_the_papers(preset, count):
    """Appendix E at 32,000 ids."""
    assert model.size(model.PRESETS[preset]) == count


# ---- the forward pass ----------------------------------------------------------------------------


def numpy_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def numpy_layer_norm(x, scale, bias):
    return numpy_norm(x - x.mean(-1, keepdims=True), scale) + bias


def numpy_rotated(x, t):
    """x [K] at position t: K/2 complex numbers, number i turned by t / 10000^(2i/K)."""
    half = len(x) // 2
    angles = t / 10_000 ** (np.arange(half) / half)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def numpy_attention(config, p, x):
    """One sequence, one head, one query and one key at a time; x: [T, D]."""
    K = config.d_model // config.n_heads
    q, k, v = x @ p["wq"], x @ p["wk"], x @ p["wv"]
    if config.qk_norm:
        q = numpy_layer_norm(q, p["q_scale"], p["q_bias"])
        k = numpy_layer_norm(k, p["k_scale"], p["k_bias"])
    out = np.zeros_like(x)
    for head in range(config.n_heads):
        of_q = slice(head * K, (head + 1) * K)
        kv_head = head * config.n_kv_heads // config.n_heads
        of_kv = slice(kv_head * K, (kv_head + 1) * K)
        for t in range(len(x)):
            query = numpy_rotated(q[t, of_q], t)
            keys = [numpy_rotated(k[s, of_kv], s) for s in range(t + 1)]
            weights = np.exp([query @ key / np.sqrt(K) for key in keys])
            out[t, of_q] = weights / weights.sum() @ v[: t + 1, of_kv]
    return out @ p["wo"]


def numpy_mlp(config, p, x):
    up = x @ p["w_up"]
    if config.mlp == "gelu":
        active = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    else:
        gate = x @ p["w_gate"]
        active = gate / (1 + np.exp(-gate)) * up
    return active @ p["w_down"]


def numpy_logits(config, params, x):
    """The logits [B, T, V] of ids x [B, T], written out in float64."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    out = []
    for ids in x:
        h = params["embedding"][ids]  # [T, D]
        for i in range(config.n_layers):
            p = {name: a[i] for name, a in params["blocks"].items()}
            h = h + numpy_attention(config, p, numpy_norm(h, p["attention_norm"]))
            h = h + numpy_mlp(config, p, numpy_norm(h, p["mlp_norm"]))
        out.append(numpy_norm(h, params["final_norm"]) @ params["head"])
    return np.array(out)


def test_forward_pass_is_the_transcription(toy, float64):
    """With heads of 4 numbers, two of the periods of rotation are seen."""
    toy = dataclasses.replace(toy, d_model=16)
    params, tokens = random_params(toy), random_tokens(toy, 3)
    expected = numpy_logits(toy, params, tokens[:, :-1])
    np.testing.assert_allclose(logits(toy, params, tokens), expected, rtol=1e-11, atol=1e-11)


NAMES_IN_TRANSFORMERS = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def in_transformers(params):
    """The parameters by their names there. A weight is (out, in); each block has a name."""
    found = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"],
        "lm_head.weight": params["head"].T,
    }
    for name, stacked in params["blocks"].items():
        for i, a in enumerate(stacked):
            found[f"model.layers.{i}.{NAMES_IN_TRANSFORMERS[name]}.weight"] = a.T
    return found


def test_textbook_variant_is_the_llama_of_transformers(float64):
    """swiglu, no qk_norm, grouped queries: LlamaForCausalLM, its loss and its gradient.

    Up to float32, in which its norms and rotary angles are.
    """
    reason = "to compare with the LLaMA of transformers, pip install torch transformers"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    network = dataclasses.replace(VARIANTS["textbook"], n_kv_heads=2)
    params, tokens = random_params(network), random_tokens(network, 3)
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).double()
    weights = in_transformers(params)
    theirs.load_state_dict({name: torch.tensor(np.array(a)) for name, a in weights.items()})
    ids = torch.tensor(tokens.astype(np.int64))
    z = theirs(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(z.reshape(-1, 11), ids[:, 1:].reshape(-1))
    loss.backward()

    our_loss, our_grad = VALUE_AND_GRAD(params, tokens, network)
    our_z = logits(network, params, tokens)
    np.testing.assert_allclose(z.detach(), our_z, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss.detach(), our_loss, rtol=1e-6)
    expected = in_transformers(our_grad)
    for name, p in theirs.named_parameters():
        np.testing.assert_allclose(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_logits_do_not_depend_on_later_tokens(toy, float64):
    """Another token t leaves the logits before t exactly as they were and changes all others."""
    params, tokens = random_params(toy), random_tokens(toy, 1)
    before = logits(toy, params, tokens)
    for t in range(toy.context):
        other = tokens.copy()
        other[0, t] = (tokens[0, t] + 1) % toy.vocab_size
        after = logits(toy, params, other)
        np.testing.assert_array_equal(after[0, :t], before[0, :t])
        changes = np.abs(after[0, t:] - before[0, t:]).max(axis=-1)
        assert (changes > 0).all()


# ---- the loss ------------------------------------------------------------------------------------


def test_loss_and_its_gradient_are_the_plain_ones(toy, float64):
    """By chunks = the mean of -log softmax(z)[y] over all tokens, differentiated by jax.grad."""
    params, tokens = random_params(toy), random_tokens(toy, 3)

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        log_p = jax.nn.log_softmax(logits(toy, params, tokens))
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    expected, expected_grad = plain(params)
    loss, grad = VALUE_AND_GRAD(params, tokens, toy)
    np.testing.assert_allclose(loss, expected, rtol=1e-13)
    loss_alone = jax.jit(model.loss, static_argnums=0)(toy, params, tokens)
    np.testing.assert_allclose(loss_alone, expected, rtol=1e-13)

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)

    jax.tree.map(check, grad, expected_grad)


def test_huge_logits_stay_finite():
    """Logits of 1e4 give a finite loss and gradient: the maximum is subtracted first."""
    z = 1e4 * jnp.eye(3, 5)
    loss, grad = jax.value_and_grad(model.cross_entropy)(z, jnp.array([0, 0, 1]))
    np.testing.assert_allclose(loss, 2e4, rtol=1e-6)
    assert np.isfinite(grad).all()


def test_huge_scores_stay_finite():
    """So do queries and keys whose products are 1e4."""
    q = k = 100 * jnp.ones((1, 3, 1, 2))
    v = jnp.arange(6.0).reshape(1, 3, 1, 2)
    out = model.attention(q, k, v)
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 1, 2], rtol=1e-6)


@pytest.mark.parametrize("chunk, chunks", [(1, 15), (4, 5), (5, 3), (7, 3), (15, 1), (4096, 1)])
def test_a_chunk_has_at_most_head_chunk_tokens(chunk, chunks):
    """15 tokens in the smallest number of equal chunks that are no larger."""
    network = dataclasses.replace(TOY, head_chunk=chunk)
    numbers = jnp.arange(15).reshape(3, 5)

    def count(part):
        return part, (1, part.sum())

    out, (total, of_all) = model.over_tokens(network, count, numbers)
    assert (int(total), int(of_all)) == (chunks, 105)
    np.testing.assert_array_equal(out, numbers)


def test_head_both_ways_is_the_pushforward_and_the_pullback_of_the_head(float64):
    """By jax.jvp and jax.vjp of (h, w) -> h w."""
    params, delta = random_params(TOY), random_params(TOY, 1)
    h, dh = np.random.default_rng(0).normal(size=(2, 3, 8))
    u = np.random.default_rng(1).normal(size=(3, 11))
    z, v, pull = model.head_both_ways(TOY, params, delta)(jnp.asarray(h), jnp.asarray(dh))
    h_bar, head_grad = pull(jnp.asarray(u))

    place, change = (h, params["head"]), (dh, delta["head"])
    expected_z, expected_v = jax.jvp(jnp.matmul, place, change)
    _, pullback = jax.vjp(jnp.matmul, *place)
    expected_h_bar, expected_w_bar = pullback(jnp.asarray(u))
    assert head_grad.keys() == {"head"}
    for found, expected in (
        (z, expected_z),
        (v, expected_v),
        (h_bar, expected_h_bar),
        (head_grad["head"], expected_w_bar),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


# ---- bfloat16 ------------------------------------------------------------------------------------


def test_bfloat16_is_close_to_float32():
    """dtype bfloat16 rounds what matrix products read, to 8 bits, and nothing that is stored."""
    params, tokens = random_params(TOY), random_tokens(TOY, 4)
    loss, grad = VALUE_AND_GRAD(params, tokens, TOY)
    rounded = dataclasses.replace(TOY, dtype="bfloat16")
    rounded_loss, rounded_grad = VALUE_AND_GRAD(params, tokens, rounded)
    assert rounded_loss.dtype == jnp.float32
    assert 0 < abs(rounded_loss - loss) < 0.02 * loss
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(rounded_grad), strict=True):
        assert b.dtype == jnp.float32
        # 0.02 here. Each of about ten products in a row adds some 2^-8; processors differ.
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(a)


def test_bfloat16_rounds_nothing_but_products():
    """Where the last products of the blocks are 0, `hidden` is float32's."""
    params, x = random_params(TOY), random_tokens(TOY, 4)[:, :-1]
    for name in ("wo", "w_down"):
        params["blocks"][name] *= 0
    rounded = dataclasses.replace(TOY, dtype="bfloat16")
    hidden = jax.jit(model.hidden, static_argnums=0)
    np.testing.assert_allclose(hidden(rounded, params, x), hidden(TOY, params, x), rtol=1e-5)


def test_logits_keep_float32_where_what_makes_them_is_rounded():
    """The head's sums are not rounded to bfloat16, which would cost the loss its digits."""
    network = dataclasses.replace(TOY, dtype="bfloat16")
    h, w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8)), jnp.float32)
    z = model.head(network, h, w)
    assert z.dtype == jnp.float32
    assert (z != z.astype(jnp.bfloat16)).any()
    exact = np.asarray(h.astype(jnp.bfloat16), float) @ np.asarray(w.astype(jnp.bfloat16), float)
    np.testing.assert_allclose(z, exact, rtol=1e-4, atol=1e-5)


# ---- the first parameters, and sizes -------------------------------------------------------------


def test_initial_scales():
    """Embedding std 1, matrices std 1/√in, norms one, biases zero."""
    config = dataclasses.replace(TOY, d_model=128, d_ff=256, vocab_size=300)
    params = model.init(config, jax.random.key(0))
    assert abs(params["embedding"].std() - 1) < 0.02
    assert abs(params["head"].std() * 128**0.5 - 1) < 0.02
    for name, a in params["blocks"].items():
        if name in model.MATRICES:
            assert abs(a.std() * a.shape[1] ** 0.5 - 1) < 0.02
        else:
            assert (a == (0 if name.endswith("bias") else 1)).all()
    assert (params["final_norm"] == 1).all()


def test_no_two_parameters_are_drawn_alike():
    params = model.init(TOY, jax.random.key(0))
    blocks = params["blocks"]
    stacks = [blocks["wq"], blocks["wo"], params["embedding"], params["head"]]
    rows = [a.reshape(-1)[:60] for a in stacks]
    correlations = np.abs(np.corrcoef(rows)) - np.eye(4)
    assert correlations.max() < 0.5


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"n_heads": 3}, "d_model 8 over n_heads 3"),
        ({"n_heads": 8}, "even"),
        ({"n_kv_heads": 3}, "multiple of n_kv_heads 3"),
        ({"mlp": "relu"}, "gelu, swiglu"),
        ({"dtype": "float16"}, "float32, bfloat16"),
        ({"context": 0}, "context is 0"),
        ({"n_layers": -1}, "n_layers is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(bad, says):
    TOY.check()
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(TOY, **bad).check()
