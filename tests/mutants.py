"""Would the tests notice? `python tests/mutants.py`: each fault below is put into a copy of the code and the tests run.

A fault is one line of code, changed. The tests of the file that it is in run first, until four have failed, and where
none does, those of the others, until one has; golden numbers are left out, as they would notice anything and explain
nothing. What is printed is a table of faults and of the tests that notice them; exit status 1 if one is noticed by none.
Words on the command line choose the faults whose file or description holds one of them. An hour and a half on two cores.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
JOBS = os.cpu_count() or 1

FAULTS = [  # file, what is wrong, the line as it is, the line as it would be
    # the objective
    ("gn.py", "curvature dropped from the gradient", "jnp.vdot(v, Hv) / 2, g + Hv)", "jnp.vdot(v, Hv) / 2, g)"),
    ("gn.py", "curvature with the wrong sign", "jnp.vdot(v, Hv) / 2, g + Hv)", "jnp.vdot(v, Hv) / 2, g - Hv)"),
    ("gn.py", "the half of ½ v·Hv dropped", "jnp.vdot(v, Hv) / 2, g + Hv)", "jnp.vdot(v, Hv), g + Hv)"),
    ("gn.py", "curvature twice in the products of cg", "jnp.vdot(v, H(v)) / 2, H(v))", "jnp.vdot(v, H(v)) / 2, 2 * H(v))"),
    ("gn.py", "δ = θ_t - θ", "jnp.subtract, state.theta, state.params)", "jnp.subtract, state.params, state.theta)"),
    ("gn.py", "gradient at θ, not linearized at θ_t", "grad = at(state.params, delta, tokens)", "grad = at(state.theta, delta, tokens)"),
    ("gn.py", "the head's own tangent dropped", "jnp.concatenate([theta0[\"head\"], delta[\"head\"]])", "jnp.concatenate([theta0[\"head\"], 0 * delta[\"head\"]])"),
    ("gn.py", "damping missing from the gradient", "a / size + config.damping * d, grad", "a / size, grad"),
    ("gn.py", "damping with the wrong sign in the loss", "value / size + config.damping / 2", "value / size - config.damping / 2"),
    ("gn.py", "sums for means in the gradient", "lambda a, d: a / size + config", "lambda a, d: a + config"),
    ("gn.py", "cg solves for +g", "jax.tree.map(jnp.negative, grad)", "jax.tree.map(jnp.positive, grad)"),
    ("gn.py", "cg solves on the first inner batch only", "jax.lax.scan(add, start, tokens)[0])", "jax.lax.scan(add, start, jnp.stack(N * [tokens[0]]))[0])"),
    ("gn.py", "cg stops early", "tol=1e-10", "tol=1e-2"),
    ("gn_prox.py", "L1 at z instead of z + v", "jax.value_and_grad(loss)(z + v)", "jax.value_and_grad(loss)(z)"),
    ("gn_prox.py", "L1 at z - v", "jax.value_and_grad(loss)(z + v)", "jax.value_and_grad(loss)(z - v)"),
    ("gn_prox.py", "prox with Gauss-Newton's objective", "config, watch, exact)", "config, watch)"),
    ("gn_prox.py", "a line search by default", "line_search: int = 0", "line_search: int = 5"),
    ("layerwise_gn.py", "layers 10 and 11 with layer 1, as by prefix", ".at[i].set(own(dp))", ".at[i if i < 10 else 1].add(own(dp))"),
    ("layerwise_gn.py", "a stream pulled one layer short", "streams = each(to_below, streams, i)", "streams = each(to_below, streams, i - 1)"),
    ("layerwise_gn.py", "a block's δ dropped", "set(own(dp))", "set(0 * own(dp))"),
    ("layerwise_gn.py", "the head's δ dropped", "objective(z, own[None], y)", "objective(z, 0 * own[None], y)"),
    ("layerwise_gn.py", "the loss at θ_t counted once a layer", "jnp.sum(below - at_theta0)", "jnp.sum(below)"),
    ("layerwise_gn.py", "chunks take each other's tangents", "jax.lax.dynamic_slice_in_dim(streams, i * len(y)", "jax.lax.dynamic_slice_in_dim(streams, 0 * len(y)"),
    ("layerwise_gn.py", "--objective not heard", "OBJECTIVES[config.objective], linearized)", 'OBJECTIVES["quadratic"], linearized)'),
    ("layerwise_gn.py", "full Gauss-Newton after all", "OBJECTIVES[config.objective], linearized)", "OBJECTIVES[config.objective])"),
    # the outer step
    ("gn.py", "layerwise is not passed on to the inner step", "batches(k), unit, objective, linearized, config.lr)", "batches(k), unit, objective, lr=config.lr)"),
    ("gn.py", "prox is not passed on to the inner step", "batches(k), unit, objective, linearized, config.lr)", "batches(k), unit, quadratic, linearized, config.lr)"),
    ("gn.py", "one inner batch for all inner steps", "inner_step(state, batches(k)", "inner_step(state, batches(0)"),
    ("gn.py", "resumed at the first inner step", "for k in range(int(state.k), 1 if", "for k in range(0, 1 if"),
    ("gn.py", "the next inner loop starts from θ_{t+1}", "params=params, theta=theta, average", "params=params, theta=params, average"),
    ("gn.py", "momentum restarts each outer step", "average=average, opt=opt, t=state.t + 1)", "average=average, t=state.t + 1)"),
    ("gn.py", "Muon's momentum not heard", "baselines.muon(lr, config.momentum", "baselines.muon(lr, 0.95"),
    ("gn.py", "weight decay not heard", "config.weight_decay, config.clip)\n    return", "0.0, config.clip)\n    return"),
    ("gn.py", "the parameters decay, the iterate does not", "params, theta = shrink(params), shrink(theta)", "params = shrink(params)"),
    ("gn.py", "a refused step decays", "jnp.where(alpha == 0, 1, 1 - config", "jnp.where(alpha == 2, 1, 1 - config"),
    ("gn.py", "the line from θ to θ_t", "a + alpha * (b - a)", "b + alpha * (a - b)"),
    ("gn.py", "α halves each time", "2.0 ** (-jnp.arange(config.line_search) / 2)", "2.0 ** (-jnp.arange(config.line_search))"),
    ("gn.py", "α in the opposite order", "return alphas[jnp.argmin(", "return alphas[::-1][jnp.argmin("),
    ("gn.py", "the line search on its first fresh batch only", "alphas, fresh(k), config.model)", "alphas, fresh(0), config.model)"),
    ("gn.py", "infinite weights with a finite loss accepted", "(alpha == 0) | finite", "(alpha == 0) | (alpha > 0)"),
    ("gn.py", "NaN taken for the least loss", "jnp.argmin(jnp.where(jnp.isfinite(total), total, jnp.inf))", "jnp.argmin(total)"),
    ("gn.py", "the average of inner iterates is overwritten", "averaged(state.average, theta, config.average)", "averaged(state.theta, theta, config.average)"),
    ("gn.py", "an average over outer steps that counts each as one", "config.average**config.inner_steps", "config.average"),
    ("gn.py", "an average over inner steps with cg, which has none", 'not self.line_search and self.inner != "cg"', "not self.line_search"),
    # schedules
    ("gn.py", "lr of the first inner step for all", "learning_rate(state.t, state.k, config), config)", "learning_rate(state.t, 0, config), config)"),
    ("gn.py", "inner cosine one step ahead", "inner = cosine(k / N,", "inner = cosine((k + 1) / N,"),
    ("gn.py", "global cosine by outer steps", "cosine((t + k / N) / T,", "cosine(t / T,"),
    ("gn.py", "schedules exchanged", "(inner, whole, whole * inner, 1)", "(whole, inner, whole * inner, 1)"),
    ("gn.py", "warm-up counted in outer steps", "config.warmup * T * N)", "config.warmup * T)"),
    ("gn.py", "the lr in the log is the last inner step's", "learning_rate(state.t, 0, config)\n    metrics", "learning_rate(state.t, N - 1, config)\n    metrics"),
    ("baselines.py", "cosine one step ahead", "cosine(t / config.outer_steps", "cosine((t + 1) / config.outer_steps"),
    ("baselines.py", "cosine from the start, warm-up or not", "(x - start) / (1 - start)", "x"),
    ("baselines.py", "the rise begins at lr 0", "(step + 1) / max(1, steps)", "step / max(1, steps)"),
    # optimizers
    ("baselines.py", "sums for means over inner batches", "g / config.inner_steps, state.grad", "g, state.grad"),
    ("baselines.py", "only the last inner batch's loss", "loss=state.loss + loss, grad", "loss=loss, grad"),
    ("baselines.py", "only the last inner batch's gradient", "jax.tree.map(jnp.add, state.grad, grad))", "grad)"),
    ("baselines.py", "a matrix in the wrong group", 'k: "muon" if k in model.MATRICES', 'k: "muon" if k in model.MATRICES[:-1]'),
    ("baselines.py", "the head does not decay", '"embedding": True, "head": True', '"embedding": True, "head": False'),
    ("baselines.py", "clip 0 zeroes the update", "if limit > 0 else", "if limit >= 0 else"),
    ("baselines.py", "one clip for both groups", 'return optax.partition({"muon": matrices, "adamw": adamw(lr, 0.9, 0.999, weight_decay, clip)}, groups)', 'return optax.chain(clipping(clip), optax.partition({"muon": matrices, "adamw": adamw(lr, 0.9, 0.999, weight_decay, clip)}, groups))'),
    ("baselines.py", "Muon without its clip", "optax.chain(clipping(clip), nesterov(momentum)", "optax.chain(nesterov(momentum)"),
    ("baselines.py", "Muon's axes exchanged", "reduction_axis=1, output_axis=2", "reduction_axis=2, output_axis=1"),
    ("baselines.py", "Muon's momentum not Nesterov's", "ahead = optax.tree.update_moment(without_bias(grads, count=t), without_bias(m, count=t + 1), decay, 1)", "ahead = without_bias(m, count=t)"),
    ("baselines.py", "Adam's b2 not heard", "optax.adamw(lr, b1, b2,", "optax.adamw(lr, b1, 0.95,"),
    ("baselines.py", "average with 1 - τ for τ", "params, average, 1 - tau)", "params, average, tau)"),
    ("baselines.py", "the average is overwritten", "State(params, average, opt, state.t + 1", "State(params, state.average, opt, state.t + 1"),
    ("baselines.py", "SOAP's b1 and b2 exchanged", "soap(lr, self.b1, self.b2,", "soap(lr, self.b2, self.b1,"),
    ("soap.py", "second moment frozen between refreshes", "b2 * s.v + (1 - b2) * g * g))", "jnp.where(n % frequency == 0, b2 * s.v + (1 - b2) * g * g, s.v)))"),
    ("soap.py", "first moment not carried into the new basis", "Rotated(rotate(back(m), Q),", "Rotated(m,"),
    ("soap.py", "second moment not reordered with its basis", "            v = jnp.take_along_axis(v,", "            _ = jnp.take_along_axis(v,"),
    ("soap.py", "factors exchanged", "if side == 0 else product(G.mT, G)", "if side == 1 else product(G.mT, G)"),
    ("soap.py", "no bias correction", "move = unbiased * back", "move = back"),
    ("soap.py", "a side as long as the largest keeps the identity", "if d <= largest else None", "if d < largest else None"),
    # the network
    ("kernels/attention.py", "no causal mask", "jnp.where(causal[None, None, None], s / K**0.5, -jnp.inf)", "s / K**0.5"),
    ("kernels/attention.py", "softmax without subtraction of the maximum", "jax.nn.softmax(s, axis=-1).astype", "(jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)).astype"),
    ("kernels/attention.py", "scores over K", "s / K**0.5", "s / K"),
    ("kernels/attention.py", "heads interleaved over groups", "q = q.reshape(B, T, G, H // G, K)", "q = q.reshape(B, T, H // G, G, K).swapaxes(2, 3)"),
    ("kernels/cross_entropy.py", "loss without subtraction of the maximum", "jax.nn.logsumexp(z, axis=-1)", "jnp.log(jnp.sum(jnp.exp(z), axis=-1))"),
    ("kernels/heads.py", "nothing is rotated", "(a, b), (cos, sin) = x, turn", "(a, b), (cos, sin) = x, (1, 0)"),
    ("kernels/heads.py", "the other sense of rotation in one half", "a * sin + b * cos]", "b * cos - a * sin]"),
    ("model.py", "no residual around the MLP", "return h + remade(", "return remade("),
    ("model.py", "gate and up exchanged", "up * (gelu() if gate is None else jax.nn.silu(wide(gate)))", "(up * gelu() if gate is None else wide(gate) * jax.nn.silu(up))"),
    ("kernels/heads.py", "no mean subtracted in LayerNorm", "x = [(a - mean) * inside for a in x]", "x = [a * inside for a in x]"),
    ("model.py", "mean over T + 1 tokens", "h, y)[0] / y.size", "h, y)[0] / tokens.size"),
    ("model.py", "std of the other side of a matrix", "(L, *s)) / s[0] ** 0.5", "(L, *s)) / s[1] ** 0.5"),
    ("model.py", "targets not shifted", "x, y = tokens[:, :-1], tokens[:, 1:]\n    h, (w,)", "x, y = tokens[:, :-1], tokens[:, :-1]\n    h, (w,)"),
    # data
    ("data.py", "held-out documents beyond some count are trained on", '"val" if source.held_out or held_out(text) else', '"val" if (source.held_out or held_out(text)) and meta["val_tokens"] < 5000 else'),
    ("data.py", "documents held out by turn, not by hash", '"val" if source.held_out or held_out(text) else', '"val" if meta["train_bytes"] % 20 == 19 or not meta["val_bytes"] else'),
    ("data.py", "one window too many", "return (len(tokens) - 1) // context", "return len(tokens) // context"),
    ("data.py", "windows that skip a token", "[place]) * context for", "[place]) * (context + 1) for"),
    ("data.py", "every epoch in the same order", "np.random.default_rng((seed, epoch))", "np.random.default_rng((seed, 0))"),
    ("data.py", "batches that overlap", "range(index * size, (index + 1) * size)", "range(index, index + size)"),
    ("data.py", "no end-of-text", "write(ids.tobytes() + np.uint16(tok.end_of_text).tobytes())", "write(ids.tobytes())"),
    # the run
    ("train.py", "line search on the batch it was trained on", "live.read(first + run.settings.inner_steps)", "live.read(first)"),
    ("train.py", "training reads the warm-up's batches again", "start, first = time.perf_counter(), run.warmup_batches + t", "start, first = time.perf_counter(), t"),
    ("train.py", "line search tokens not counted", "(run.warmup_batches + t * run.step_batches) * run.inner_tokens", "(run.warmup_batches + t * run.settings.inner_steps) * run.inner_tokens"),
    ("train.py", "evaluation on training text", "data.sequences(live.corpus.val, context, 0,", "data.sequences(live.corpus.train, context, 0,"),
    ("train.py", "other windows for another seed", "live.corpus.val, context, 0, range", "live.corpus.val, context, run.config.seed, range"),
    ("train.py", "evaluation skips its first windows", "range(i, min(i + size, windows))", "range(i + size, min(i + size, windows) + size)"),
    ("train.py", "the last windows weigh as a whole batch", "parallel.rows)) * len(rows)", "parallel.rows)) * size"),
    ("train.py", "evaluated weights are not the average", "baselines.weights(state), t, metrics)", "state.params, t, metrics)"),
    ("train.py", "bits a byte in nats", "value / math.log(2) *", "value *"),
    ("runtime/live.py", "an older state saved over a newer one", "self.state, self.saved = None, time.monotonic()", "self.saved = time.monotonic()"),
    ("train.py", "seconds and refusals since the last row lost", "new[name] + metrics.get(name, 0)", "new[name]"),
    ("train.py", "seconds of all steps in each row", "live.ahead.waited, metrics = 0.0, {}", "live.ahead.waited = 0.0"),
    ("train.py", "the state of the run before saved in this one's folder", "live.training, live.state, t = True, None, 0", "live.training, t = True, 0"),
    ("runtime/checkpoint.py", "rows after the checkpoint kept on resuming", 'if row["step"] <= int(state.t)]', "if True]"),
    ("train.py", "diverged at the step after", '{"step": t, "val_loss": None', '{"step": t + 1, "val_loss": None'),
    ("train.py", "--tokens not heard where the model has steps", 'if "tokens" in given', 'if "token" in given'),
    ("train.py", "config.json without what was resolved", "values |= {name: getattr(settings, name) for name in pick(cls)}", "values |= {}"),
    ("train.py", "the warm-up's learning rate does not rise", 'schedule="constant", warmup=0.1)', 'schedule="constant", warmup=0.0)'),
    ("train.py", "stops before the target loss", 'rows[-1]["val_loss"] <= config.target_loss', 'rows[-1]["val_loss"] >= config.target_loss'),
    ("runtime/checkpoint.py", "checkpoints in half precision", "parallel.whole(a) for where", 'parallel.whole(a).astype("f2").astype(a.dtype) for where'),
    ("runtime/checkpoint.py", "another run's folder taken over", "    if differ:\n", "    if not then:\n"),
    ("runtime/files.py", "a file that was not finished stays", "            draft.unlink()\n", ""),
    ("runtime/flags.py", "help of a field from the class above", "for c in reversed(cls.__mro__)", "for c in cls.__mro__"),
    ("runtime/flags.py", "k is 1024", '"k": 10**3', '"k": 1024'),
    ("runtime/flags.py", "a grid of the first flag only", "itertools.product(*options)", "zip(*options)"),
    ("train.py", "members of a grid share a folder", "files.digest(values, checkpoint.code())[:6]", "files.digest(checkpoint.code())[:6]"),
    ("train.py", "the warm-up of another text", 'live.corpus.meta["sha256"], about)', "about)"),
    ("train.py", "the warm-up of other code", "device_kind, checkpoint.code(*WARMUP_CODE.split())]", "device_kind]"),
    ("train.py", "goes on with another text", '"out": None, "corpus": corpus.meta["sha256"]}\n', '"out": None}\n'),
    ("train.py", "two tokens a parameter", "config.tokens or 20 * parameters", "config.tokens or 2 * parameters"),
    ("runtime/checkpoint.py", "the code's hash is of its names", "[path.name, path.read_text()]", "[path.name]"),
    ("data.py", "the text's hash is of nothing", 'return hashlib.file_digest(f, "sha256").hexdigest()', 'return "0"'),
    ("text/documents.py", "modules cut into documents", 'path.suffix == ".txt"\n    try', "True\n    try"),
    ("text/documents.py", "a text edited in place is not prepared again", "s.st_size, s.st_mtime_ns)", "s.st_size)"),
    ("model.py", "logits rounded to bfloat16", "return product(config, h, w, h.dtype)", "return product(config, h, w).astype(h.dtype)"),
    ("model.py", "chunks larger than head_chunk", "range(-(-tokens // config.head_chunk), tokens + 1)", "range(max(1, tokens // config.head_chunk), tokens + 1)"),
    ("model.py", "other heads at 150m", "n_heads=16, n_kv_heads=16", "n_heads=12, n_kv_heads=12"),
    ("kernels/attention.py", "scores rounded to bfloat16", "preferred_element_type=jnp.promote_types(q.dtype, jnp.float32)", "preferred_element_type=q.dtype"),
    ("gn.py", "--cg-steps not heard", "tol=1e-10, maxiter=config.cg_steps)", "tol=1e-10)"),
    ("gn.py", "the last inner batch's loss for the mean", '"loss": state.loss + loss,', '"loss": config.inner_steps * loss,'),
    ("gn.py", "the last inner batch's inner loss for the mean", '"inner_loss": state.inner_loss + value}', '"inner_loss": config.inner_steps * value}'),
    ("gn.py", "a step that is no better is taken", "[jnp.zeros(int(config.guard)), 2.0 ** (-jnp.arange(config.line_search) / 2)]", "[2.0 ** (-jnp.arange(config.line_search) / 2), jnp.zeros(int(config.guard))]"),
    ("gn.py", "another schedule by default", "schedule: str = SCHEDULES[0]", "schedule: str = SCHEDULES[1]"),
    ("gn.py", "curvature's own value doubled", "jnp.vdot(v, H(v)) / 2, H(v))", "jnp.vdot(v, H(v)), H(v))"),
    ("baselines.py", "SOAP's b1 and b2 exchanged further down", "scale_by_soap(b1, b2, frequency", "scale_by_soap(b2, b1, frequency"),
    ("baselines.py", "a decay of one is let through", 'for name in ("b1", "b2", "momentum", "warmup"', 'for name in ("b2", "warmup"'),
    ("runtime/flags.py", "true is false", '{"true": True, "false": False}', '{"true": False, "false": True}'),
    ("runtime/flags.py", "a path with a comma is a grid", 'name in ("--out", "--generate") or exists(text)', 'name in ("--out", "--generate")'),
    ("runtime/report.py", "tokens of the line search taken for all", "{tokens:,} tokens, {search:,} of", "{search:,} tokens, {tokens:,} of"),
    ("runtime/checkpoint.py", "NaN in the log", "allow_nan=False", "allow_nan=True"),
    ("runtime/live.py", "a second Ctrl-C waits like the first", "if again or not (self", "if not (self"),
    # several devices and processes
    ("runtime/parallel.py", "sums for means", "else jax.lax.pmean(tree, name)", "else jax.lax.psum(tree, name)"),
    ("runtime/parallel.py", "sums for means of a spread gradient", "tiled=True) / mesh.size", "tiled=True)"),
    ("runtime/parallel.py", "every device reads all rows", "PartitionSpec() if len(tokens) % mesh.size else", "PartitionSpec() if len(tokens) else"),
    ("runtime/parallel.py", "no averaging", "if mesh.size < 2:\n            return f", "if mesh.size < 9:\n            return f"),
    ("runtime/parallel.py", "cut along the smallest axis", "*max(axes, key", "*min(axes, key"),
    ("runtime/parallel.py", "--shard not heard", '"shard" if shard else "data"', '"data"'),
    ("runtime/parallel.py", "results whole on every device", "lay = lambda a: jax.lax.with_sharding_constraint(a, spec(mesh, a))", "lay = lambda a: jax.lax.with_sharding_constraint(a, PartitionSpec())"),
    ("runtime/parallel.py", "as many devices as there are, whatever the batch", "inner_batch % (n * len(processes)) == 0", "True"),
    ("runtime/parallel.py", "a signal to another process not heard", "process_allgather(np.int32(number)).max())", "process_allgather(np.int32(number))[0])"),
    ("runtime/parallel.py", "a device's part saved for the whole", "multihost_utils.process_allgather(a, tiled=True) if parts", "np.asarray(a.addressable_data(0)) if parts"),
    ("runtime/parallel.py", "every process prints", "if jax.process_index() > 0:\n        sys", "if jax.process_index() > 9:\n        sys"),
    ("data.py", "the next batch read only when it is asked for", "for i in [index + 1] if i < self.end}", "for i in [index + 1] if False}"),
    ("data.py", "a batch beyond the end read", "for i in [index + 1] if i < self.end}", "for i in [index + 1]}"),
    ("train.py", "bfloat16 on a CPU", 'jax.default_backend() == "gpu"', 'jax.default_backend() == "cpu"'),
    # what makes it fast
    ("kernels/attention.py", "pushforward without the keys' change", "(dot(dQ, Kj.T) + dot(Q, dKj.T))", "dot(dQ, Kj.T)"),
    ("kernels/attention.py", "pushforward without the mean of ds", "total - r[:, None] * load(o, i)", "total"),
    ("kernels/attention.py", "pushforward without the values' change", "dot(w, Vj) + dot(p.astype(Vj.dtype), dVj)", "dot(w, Vj)"),
    ("kernels/attention.py", "pushforward that trusts the log-sum-exp", "* load(o, i)) / n[:, None])", "* load(o, i)))"),
    ("kernels/attention.py", "the pushforward's mask one off", "jnp.arange(TILE)[:, None] >= jnp.arange(TILE)[None], p, 0", "jnp.arange(TILE)[:, None] > jnp.arange(TILE)[None], p, 0"),
    ("kernels/attention.py", "the pushforward's key-value head of another group", "lambda i, h, b: (b, 0, h // group, 0)", "lambda i, h, b: (b, 0, h % group, 0)"),
    ("kernels/attention.py", "tiles before the diagonal left out", "jax.lax.fori_loop(0, i, partial(tile", "jax.lax.fori_loop(1, i, partial(tile"),
    ("kernels/attention.py", "the scale of ds dropped", "dot(Q, dKj.T)) * scale)", "dot(Q, dKj.T)))"),
    ("kernels/cross_entropy.py", "the largest logit of a tile only", "m = jnp.maximum(sums[0], jnp.max(t))", "m = jnp.max(t)"),
    ("kernels/cross_entropy.py", "p·v not subtracted", "p * (1 + vj - mean)", "p * (1 + vj)"),
    ("kernels/cross_entropy.py", "curvature's value without its square", "(square - mean * mean) / 2", "square / 2"),
    ("kernels/cross_entropy.py", "the label's 1 forgotten", "u = p - jnp.where(j * TILE + jnp.arange(TILE) == label, 1.0, 0.0)", "u = p"),
    ("kernels/cross_entropy.py", "what is beyond a row counts", "inside = j * TILE + jnp.arange(TILE) < V", "inside = j * TILE + jnp.arange(TILE) < V + 1"),
    ("kernels/cross_entropy.py", "the exact loss at z, not at z + v", "lse[1] - z[label] - v[label]", "lse[0] - z[label] - v[label]"),
    ("kernels/cross_entropy.py", "all changes of a row are the first", "change = pl.BlockSpec((None, None, V), lambda s, i: (s, i, 0))", "change = pl.BlockSpec((None, None, V), lambda s, i: (0 * s, i, 0))"),
    ("kernels/linear.py", "the transpose transposed is not the function", "f=transpose, transpose=f, tree=tree", "f=transpose, transpose=transpose, tree=tree"),
    ("kernels/linear.py", "a stack's first for all", "return out, [0] * len(out)", "return [jnp.broadcast_to(a[:1], a.shape) for a in out], [0] * len(out)"),
    ("kernels/heads.py", "keys and queries exchanged", "q, k, v = x[:, :, :H], x[:, :, H : H + G], x[:, :, H + G :]", "k, q, v = x[:, :, :H], x[:, :, H : H + G], x[:, :, H + G :]"),
    ("baselines.py", "Muon in bfloat16 always", 'jnp.bfloat16 if dtype == "bfloat16" else None)\n        steps', 'jnp.bfloat16)\n        steps'),
    ("gn.py", "lr not heard", "optimizer(lr * learning_rate(state.t, state.k, config), config)", "optimizer(learning_rate(state.t, state.k, config), config)"),
    ("gn.py", "a line search over the batch, whatever is asked", "for k in range(config.fresh_batches)", "for k in range(config.inner_steps)"),
    ("baselines.py", "a baseline's lr not heard", "config.optimizer(lr * learning_rate", "config.optimizer(learning_rate"),
    ("train.py", "line-search tokens in other units", "inner_tokens = config.inner_batch * network.context", "inner_tokens = config.inner_batch"),
    ("kernels/heads.py", "columns beyond a row in its variance", "x = [(a - mean) * inside for a in x]", "x = [a - mean for a in x]"),
    ("kernels/heads.py", "a part of the row read at the first part's place", "rows = [(ref, first) for ref in whole]", "rows = [(ref, 0) for ref in whole]"),
    ("kernels/heads.py", "a part of the cotangent written at the first part's place", "out = (results[0], first) if parts", "out = (results[0], 0) if parts"),
    ("kernels/heads.py", "the norms' own change forgotten", "(dx, *norms[n:]))[1], []", "(dx, *map(list, jax.tree.map(jnp.zeros_like, norms[n:]))))[1], []"),
    ("kernels/heads.py", "the norms' gradient of one program only", "jnp.sum(a, axis=(0, 1)) for a in results[number:]", "a[0, 0] for a in results[number:]"),
    ("kernels/heads.py", "rows beyond the context counted", "rows_left = jnp.minimum(turn[0].shape[0], T - turn[0].shape[0] * pl.program_id(0))", "rows_left = turn[0].shape[0]"),
    ("kernels/heads.py", "the norms' gradient in the wrong order", "x_bar, *norm_bar = jax.vjp(f, x, *norm)[1](u)", "x_bar, *norm_bar = jax.vjp(f, x, *norm)[1](u)\n    norm_bar = norm_bar[::-1]"),
    ("kernels/heads.py", "one angle too far", "angle = jnp.arange(T)[:, None]", "angle = 1 + jnp.arange(T)[:, None]"),
    ("kernels/linear.py", "what a pullback needs kept for it", "jax.vjp(f, *jax.lax.optimization_barrier(residuals[0]))", "jax.vjp(f, *residuals[0])"),
    ("runtime/parallel.py", "every device orthogonalizes every matrix", "if mesh.size < 2 or len(stack) % mesh.size:", "if mesh.size < 9:"),
    ("runtime/parallel.py", "the momentum gathered along with the step", "stack = lay(stack, spec(mesh, stack))  # or", "stack = stack  # or"),
    ("baselines.py", "momentum's bias of one step later", "m, t = optax.tree.update_moment(grads, state.ema, decay, 1), state.count + 1", "m, t = optax.tree.update_moment(grads, state.ema, decay, 1), state.count + 2"),
    ("data.py", "a draft not cut to what was counted", 'f.truncate(2 * meta[f"{side}_tokens"])', "f.tell()"),
    ("data.py", "a document again after an interruption", 'islice(source.read(), meta["documents"], None)', 'islice(source.read(), max(0, meta["documents"] - 1), None)'),
    ("data.py", "a damaged token file is read", "if meta and all(checksum(", "if meta or all(checksum("),
    ("data.py", "more files than needed", "source.held_out or have < need", "source.held_out or have < float('inf')"),
    ("data.py", "validation files trained on", '"val" if source.held_out or held_out(text) else', '"val" if held_out(text) else'),
    ("runtime/files.py", "two processes at once", "fcntl.LOCK_EX", "fcntl.LOCK_SH"),
    ("data.py", "a slice that ends with its array", "min(stop, b) - a) for", "b - a) for"),
    ("data.py", "the document at the limit trained on", "of(text) <= largest()", "of(text) < largest()"),
    ("text/documents.py", "a line that ends in another block lost", "                parts = others[-1:]\n", "                parts = []\n"),
    ("text/documents.py", "a document again after a failure", "islice(read(), done, None)", "islice(read(), max(0, done - 1), None)"),
    ("text/documents.py", "pauses that never begin anew", "done, failures = done + 1, 0", "done, failures = done + 1, failures"),
    ("text/documents.py", "blank documents", "return [value] if value.strip() else []", "return [value]"),
    ("text/documents.py", "mistakes tried again", "except MISTAKES:", "except ():"),
    ("text/tokenizer.py", "one merge too many", "if rank < size - 1}", "if rank < size}"),
    ("runtime/live.py", "saved at the ends of outer steps only", "        if self.due:\n", "        if False:\n"),
    ("runtime/checkpoint.py", "a damaged checkpoint written over", "os.replace(newest, next(path for path in names if not path.exists()))", "newest.unlink()"),
    ("runtime/checkpoint.py", "one checkpoint only", "if newest.exists():\n            before", "if False:\n            before"),
    ("runtime/checkpoint.py", "what was written is not read", "if f.testzip():", "if False:"),
    ("runtime/checkpoint.py", "two runs in one folder", "if parallel.largest(taken):", "if False:"),
    ("sample.py", "the weights, not their average", 'part = ".average" if ".average[\'head\']" in arrays else ".params"', 'part = ".params"'),
    ("sample.py", "documents without end", "if ids[-1] == tok.end_of_text:", "if False:"),
    ("sample.py", "the same words with every seed", "jax.random.key(seed), LENGTH", "jax.random.key(0), LENGTH"),
    ("train.py", "all failures of the device as if of memory", 'if "RESOURCE_EXHAUSTED" not in str(error):', "if False:"),
    ("runtime/checkpoint.py", "a flipped bit that ends in a traceback", "EOFError, RuntimeError, zipfile", "EOFError, zipfile"),
    ("runtime/live.py", "a signal that passes for a failure", "class Stop(BaseException):", "class Stop(Exception):"),
    ("data.py", "damaged bytes that count as done", "progress.unlink(missing_ok=True)  # or", "pass  # or"),
    ("data.py", "finished files gone with a bad flag", "if new and (read_all", "if True and (read_all"),
    ("train.py", "a lost warm-up begun anew", "state = (earlier(run, part, {key: state}) or {key: state})[key]", "state = state"),
    ("train.py", "a warm-up that forgets where it was", "for i in range(int(state.t), steps):", "for i in range(steps):"),
    ("train.py", "a lost warm-up kept beside the run", "        checkpoint.save(path, found)\n    checkpoint.remove(part)", "        checkpoint.save(path, found)"),
    ("runtime/live.py", "after a second Ctrl-C a state saved whose memory is used", "self.state = None  # its", "pass  # its"),
    ("data.py", "ids beyond the vocabulary read", "if len(ids) < n or ids.max() >= self.vocab_size:", "if len(ids) < n:"),
    ("data.py", "a token file that ends early read", "if len(ids) < n or ids.max() >= self.vocab_size:", "if ids.max() >= self.vocab_size:"),
    ("data.py", "counts that were changed", 'if meta.pop("check", None) == digest(meta) else', 'if meta.pop("check", None) else'),
    ("data.py", "processes for a text that needs none", 'alone = tok.name == "bytes" or', "alone = False or"),
    ("text/tokenizer.py", "texts read far ahead", "if len(ahead) > 2 * processes:", "if False:"),
    ("text/tokenizer.py", "a process killed that is no failure of the machine", "except (EOFError, BrokenPipeError, pickle.UnpicklingError):", "except ():"),
    ("runtime/files.py", "a full disk without a name", "if error.errno is None or error.filename is not None:", "if True:"),
    ("runtime/files.py", "what a draft held before stays", "            f.truncate(0)\n", ""),
    ("runtime/checkpoint.py", "rows of a log that are none", 'isinstance(row.get(name, ""), kind)', "True"),
    ("sample.py", "weights of other sizes", "if jax.tree.map(lambda a: (a.shape, a.dtype), params) != ", "if False and "),
    ("sample.py", "settings of any kind", "if type(config[name]) is not kind]", "if False]"),
    ("runtime/flags.py", "a value that ends the flags", 'text if text != [] else "--"', "text"),
    ("runtime/flags.py", "counts without end", "or abs(value) > 10**15", ""),
    ("runtime/checkpoint.py", "a draft of the warm-up stays", 'for left in (path, Path(f"{path}.draft")):', "for left in (path,):"),
    ("runtime/checkpoint.py", "a run that was killed before it began is refused", '{"lock", "config.json.draft"}', '{"lock"}'),
    ("runtime/files.py", "a folder that is gone half made again", "locked(draft, make=False)", "locked(draft)"),
    ("train.py", "more inner batches than can be counted", "if run.batches >= 2**31:", "if False:"),
]


def copy(folder):
    """The code and its tests, without what git ignores."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def failing(folder, tests, most, processes=0):
    """The names of the tests in these files that fail, the first ones, or what else went wrong."""
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "-q", "--tb=no", "-rfE", f"--maxfail={most}", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired:
        return ["(no end after half an hour)"]
    names = re.findall(r"^(?:FAILED|ERROR) tests/\S+?(?:::(\w+))?(?:\[.*)?(?: - .*)?$", done.stdout, re.M)
    return sorted({name or "(does not import)" for name in names}) or ([] if done.returncode == 0 else [done.stdout[-300:]])


def noticed(fault):
    """The tests that fail where this fault is in the code."""
    file, what, line, wrong = fault
    found = {p.stem[5:]: str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    every = {name: path for name, path in found.items() if name not in ("golden", "mutants")}
    near = [every.get(Path(file).stem, every["train"])]
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        path = Path(folder, file)
        text = path.read_text()
        assert text.count(line) == 1, f"{file}: {what}: its line is there {text.count(line)} times"
        path.write_text(text.replace(line, wrong))
        found = failing(folder, near, 4) or failing(folder, [p for p in every.values() if p not in near], 1)
    print(f"{file:16} {what}: {', '.join(found) or 'NOT NOTICED'}", flush=True)
    return found


def main(words):
    faults = [f for f in FAULTS if not words or any(w in f[0] or w in f[1] for w in words)]
    if broken := [f for f in faults if (ROOT / f[0]).read_text().count(f[2]) != 1]:
        sys.exit("\n".join(f"{file}: {what}: its line is not there once" for file, what, *_ in broken))
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        if failed := failing(folder, ["tests"], 4, JOBS):
            sys.exit(f"without any fault these tests fail: {', '.join(failed)}")
    with ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(noticed, faults))
    print("\n| file | fault | noticed by |\n| --- | --- | --- |")
    for (file, what, *_), found in zip(faults, results, strict=True):
        print(f"| `{file}` | {what} | {', '.join(f'`{name}`' for name in found) or '**none**'} |")
    missed = sum(not found for found in results)
    print(f"\n{len(faults)} faults, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
