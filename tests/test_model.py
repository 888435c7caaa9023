"""The network against a transcription in NumPy, its sizes against the paper, its loss against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOY, VARIANTS, logits, random_params, random_tokens

import model
from kernels.cross_entropy import cross_entropy

COMPILED = jax.jit(model.value_and_grad, static_argnums=0)


@pytest.mark.parametrize("preset, count", [("45m", 45_363_712), ("150m", 134_142_720)])
def test_parameter_count_is_the_papers(preset, count):
    """Appendix E at 32,000 ids."""
    assert model.size(model.PRESETS[preset]) == count


def numpy_logits(config, params, x):
    """The same network, a sequence, a head and a pair of positions at a time; ids [B, T] -> [B, T, V], float64."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    K = config.d_model // config.n_heads
    rms = lambda a, scale: a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * scale

    def layer(a, scale, bias):
        a = a - a.mean(-1, keepdims=True)
        return a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * scale + bias

    def rotated(a, t):  # a: [K], as K/2 complex numbers turned by t / 10000^(2i/K)
        turned = (a[: K // 2] + 1j * a[K // 2 :]) * np.exp(1j * t / 10_000 ** (np.arange(K // 2) * 2 / K))
        return np.concatenate([turned.real, turned.imag])

    out = []
    for ids in x:
        h = params["embedding"][ids]  # [T, D]
        for i in range(config.n_layers):
            p = {name: a[i] for name, a in params["blocks"].items()}
            a = rms(h, p["attention_norm"])
            q, k, v = a @ p["wq"], a @ p["wk"], a @ p["wv"]
            if config.qk_norm:
                q, k = layer(q, p["q_scale"], p["q_bias"]), layer(k, p["k_scale"], p["k_bias"])
            mixed = np.zeros_like(h)
            for head in range(config.n_heads):
                mine = slice(head * K, head * K + K)
                shared = head // (config.n_heads // config.n_kv_heads)
                theirs = slice(shared * K, shared * K + K)
                for t in range(len(ids)):
                    query = rotated(q[t, mine], t)
                    weight = np.exp([query @ rotated(k[s, theirs], s) / np.sqrt(K) for s in range(t + 1)])
                    mixed[t, mine] = weight / weight.sum() @ v[: t + 1, theirs]
            h = h + mixed @ p["wo"]
            m = rms(h, p["mlp_norm"])
            up = m @ p["w_up"]
            if config.mlp == "gelu":
                up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            else:
                gate = m @ p["w_gate"]
                up = gate / (1 + np.exp(-gate)) * up
            h = h + up @ p["w_down"]
        out.append(rms(h, params["final_norm"]) @ params["head"])
    return np.array(out)


def test_forward_pass_is_the_transcription(toy, float64):
    params, tokens = random_params(toy), random_tokens(toy, 3)
    np.testing.assert_allclose(
        logits(toy, params, tokens), numpy_logits(toy, params, tokens[:, :-1]), rtol=1e-11, atol=1e-11
    )


def test_textbook_variant_is_the_llama_of_transformers(float64):
    """--mlp swiglu --qk-norm false, grouped-query, is LlamaForCausalLM with the same weights: logits, loss, gradient.

    Up to float32, in which theirs has its norms and rotary angles.
    """
    reason = "to compare with the LLaMA of transformers, pip install torch transformers"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    network = dataclasses.replace(VARIANTS["textbook"], n_kv_heads=2)
    params, tokens = random_params(network), random_tokens(network, 3)
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, rms_norm_eps=1e-6)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8, attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    names = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj"}
    names |= {"w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"}
    names |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

    def theirs_of(tree):  # a weight there is (out, in), a layer has a name of its own
        flat = {"model.embed_tokens": tree["embedding"], "model.norm": tree["final_norm"], "lm_head": tree["head"].T}
        for name, a in tree["blocks"].items():
            flat |= {f"model.layers.{i}.{names[name]}": a[i].T for i in range(2)}
        return {f"{name}.weight": torch.tensor(np.array(a)) for name, a in flat.items()}

    theirs.load_state_dict(theirs_of(params))
    ids = torch.tensor(tokens.astype(np.int64))
    z = theirs(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(z.reshape(-1, 11), ids[:, 1:].reshape(-1))
    loss.backward()
    value, grad = COMPILED(network, params, tokens)
    np.testing.assert_allclose(z.detach(), logits(network, params, tokens), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss.detach(), value, rtol=1e-6)
    expected = theirs_of(grad)
    for name, p in theirs.named_parameters():
        np.testing.assert_allclose(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_loss_and_gradient_are_the_plain_ones(toy, float64):
    """By chunks = mean of -log softmax(z)[y] over all tokens, differentiated by jax.grad."""
    params, tokens = random_params(toy), random_tokens(toy, 3)

    def plain(params):
        z = jax.nn.log_softmax(logits(toy, params, tokens))
        return -jnp.mean(jnp.take_along_axis(z, tokens[:, 1:, None], axis=-1))

    value, grad = COMPILED(toy, params, tokens)
    np.testing.assert_allclose(jax.jit(model.loss, static_argnums=0)(toy, params, tokens), plain(params), rtol=1e-13)
    np.testing.assert_allclose(value, plain(params), rtol=1e-13)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grad, jax.grad(plain)(params))


def test_logits_do_not_depend_on_later_tokens(toy, float64):
    """Causality: changing token t leaves the logits before t exactly as they were, and changes those from t on."""
    params, tokens = random_params(toy), random_tokens(toy, 1)
    before = logits(toy, params, tokens)
    for t in range(toy.context):
        other = tokens.copy()
        other[0, t] = (tokens[0, t] + 1) % toy.vocab_size
        after = logits(toy, params, other)
        np.testing.assert_array_equal(after[0, :t], before[0, :t])
        assert (np.abs(after[0, t:] - before[0, t:]).max(axis=-1) > 0).all()


def test_huge_logits_stay_finite():
    """softmax subtracts the maximum: logits of 1e4 give a finite loss and gradient."""
    z, y = 1e4 * jnp.eye(3, 5), jnp.array([0, 0, 1])
    value, grad = jax.value_and_grad(cross_entropy)(z, y)
    np.testing.assert_allclose(value, 2e4, rtol=1e-6)
    assert np.isfinite(grad).all()


def test_bfloat16_is_close_to_float32(toy):
    """dtype bfloat16 rounds what matrix products read, to 8 bits, and nothing that is stored."""
    params, tokens = random_params(toy), random_tokens(toy, 4)
    rounded = dataclasses.replace(toy, dtype="bfloat16")
    (value, grad), (value16, grad16) = (COMPILED(c, params, tokens) for c in (toy, rounded))
    assert value16.dtype == jnp.float32 and {a.dtype for a in jax.tree.leaves(grad16)} == {jnp.dtype("float32")}
    assert 0 < abs(value16 - value) < 0.02 * value
    error = [
        np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(*map(jax.tree.leaves, (grad, grad16)), strict=True)
    ]
    assert max(error) < 0.05


def test_logits_keep_float32_where_what_makes_them_is_rounded():
    """The head's sums are not rounded to bfloat16, which would cost the loss its digits."""
    network = dataclasses.replace(TOY, dtype="bfloat16")
    h, w = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    z = model.head(network, jnp.asarray(h), jnp.asarray(w))
    assert z.dtype == jnp.float32 and (z != z.astype(jnp.bfloat16)).any()
    exact = np.matmul(*(np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (h, w)))
    np.testing.assert_allclose(z, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk, chunks", [(1, 15), (4, 5), (5, 3), (7, 3), (15, 1), (4096, 1)])
def test_a_chunk_has_at_most_head_chunk_tokens(chunk, chunks):
    """15 tokens in the smallest number of equal chunks that are no larger."""
    network = dataclasses.replace(TOY, head_chunk=chunk)
    count = lambda total, part: (total + 1, part[0])
    total, out = model.scan_tokens(network, count, 0, jnp.arange(15).reshape(3, 5))
    assert total == chunks
    np.testing.assert_array_equal(out, np.arange(15))


def test_initial_scales():
    """Embedding std 1, matrices std 1/sqrt(in), norms one, biases zero."""
    config = dataclasses.replace(TOY, d_model=128, d_ff=256, vocab_size=300)
    params = model.init(config, jax.random.key(0))
    assert abs(params["embedding"].std() - 1) < 0.02 and abs(params["head"].std() * 128**0.5 - 1) < 0.02
    for name, a in params["blocks"].items():
        if name in model.MATRICES:
            assert abs(a.std() * a.shape[1] ** 0.5 - 1) < 0.02
        else:
            assert (a == (0 if name.endswith("bias") else 1)).all()
    assert (params["final_norm"] == 1).all()
    drawn = [params["embedding"][:9, 0], params["head"][:9, 0], *(params["blocks"][k][0, :9, 0] for k in ("wq", "wo"))]
    assert all(abs(np.corrcoef(drawn)[i, j]) < 0.99 for i in range(4) for j in range(i))  # none drawn twice


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
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(TOY, **bad)
