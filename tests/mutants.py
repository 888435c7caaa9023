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
    # gn.py
    ("gn.py", "curvature dropped from the gradient", "return ell, L2, g + Hv", "return ell, L2, g"),
    ("gn.py", "curvature with the wrong sign", "return ell, L2, g + Hv", "return ell, L2, g - Hv"),
    ("gn.py", "the half of ½ v·Hv dropped", "jnp.vdot(v, Hv) / 2\n", "jnp.vdot(v, Hv)\n"),
    ("gn.py", "the linear part dropped from the value", "L2 = ell + jnp.vdot(g, v) + jnp", "L2 = ell + jnp"),
    ("gn.py", "δ = θ_t - θ", "jnp.subtract, state.theta, state.params)", "jnp.subtract, state.params, state.theta)"),
    ("gn.py", "linearized at θ, not at θ_t", "mean_value_and_grad(state.params, delta, tokens)", "mean_value_and_grad(state.theta, delta, tokens)"),
    ("gn.py", "the change below the head dropped", "dh = push(delta)", "dh = 0 * push(delta)"),
    ("gn.py", "the head's gradient dropped", "grad = grad | head_grad", "grad = head_grad | grad"),
    ("gn.py", "sums for means in the gradient", "total / y.size, (ell, L2, grad))", "total / y.size, (ell, L2)) + (grad,)"),
    ("gn.py", "damping missing from the gradient", "lambda g, d: g + config.damping * d", "lambda g, d: g"),
    ("gn.py", "damping with the wrong sign in the loss", "L2 += config.damping / 2", "L2 -= config.damping / 2"),
    ("gn.py", "no half in the damping of the loss", "L2 += config.damping / 2 *", "L2 += config.damping *"),
    ("gn.py", "another method's gradient is not passed on", "inner_step(state, batches(k), config, value_and_grad)", "inner_step(state, batches(k), config)"),
    ("gn.py", "one inner batch for all inner steps", "inner_step(state, batches(k), config", "inner_step(state, batches(0), config"),
    ("gn.py", "resumed at the first inner step", "for k in range(int(state.k), N):", "for k in range(0, N):"),
    ("gn.py", "a state is not handed to watch", "        watch(state)\n", "        pass\n"),
    ("gn.py", "the state's memory is not taken over", 'static_argnames="value_and_grad", donate_argnames="state")', 'static_argnames="value_and_grad")'),
    ("gn.py", "two of the first arrays in one place", "theta = jax.tree.map(jnp.copy, params)", "theta = params"),
    ("gn.py", "the caller's parameters are taken over", "    params = jax.tree.map(jnp.copy, params)\n    return State", "    return State"),
    ("gn.py", "Muon's momentum not heard", "optimizers.muon(lr, c.momentum,", "optimizers.muon(lr, 0.95,"),
    ("gn.py", "AdamW's momentum not heard", "optimizers.adamw(lr, c.momentum, 0.999", "optimizers.adamw(lr, 0.95, 0.999"),
    ("gn.py", "Muon's weight decay not heard", "c.momentum, c.weight_decay, c.clip, c.network.dtype)", "c.momentum, 0.001, c.clip, c.network.dtype)"),
    ("gn.py", "AdamW's weight decay not heard", "0.999, c.weight_decay, c.clip)", "0.999, 0.001, c.clip)"),
    ("gn.py", "Muon's clip not heard", "c.weight_decay, c.clip, c.network.dtype)", "c.weight_decay, 1.0, c.network.dtype)"),
    ("gn.py", "--inner not heard", "INNER_OPTIMIZERS[config.inner](lr, config)", 'INNER_OPTIMIZERS["muon"](lr, config)'),
    ("gn.py", "the inner optimizer's state is not kept", "average=average, opt=opt, k=state.k + 1", "average=average, k=state.k + 1"),
    ("gn.py", "the last inner batch's loss for the mean", "loss=state.loss + ell,", "loss=config.inner_steps * ell,"),
    ("gn.py", "the last inner batch's inner loss for the mean", "inner_loss=state.inner_loss + L2)", "inner_loss=config.inner_steps * L2)"),
    ("gn.py", "the average of inner iterates is overwritten", "update_average(average, theta, config.average)", "update_average(theta, theta, config.average)"),
    ("gn.py", "with a line search an average over inner steps too", "if not config.line_search:  # otherwise", "if True:  # otherwise"),
    ("gn.py", "the line from θ to θ_t", "a + alpha * (b - a)", "b + alpha * (a - b)"),
    ("gn.py", "a refused step is as broken as θ", "return jax.tree.map(lambda a, p: jnp.where(alpha == 0, a, p), theta0, point)", "return point"),
    ("gn.py", "α halves each time", "2.0 ** (-jnp.arange(config.line_search) / 2)", "2.0 ** (-jnp.arange(config.line_search))"),
    ("gn.py", "α in the opposite order", "return alphas[jnp.argmin(total)]", "return alphas[::-1][jnp.argmin(total)]"),
    ("gn.py", "the largest loss", "jnp.argmin(total)", "jnp.argmax(total)"),
    ("gn.py", "the line search on its first fresh batch only", "alphas, fresh(k), config)", "alphas, fresh(0), config)"),
    ("gn.py", "the line search by its last fresh batch", "total = total + batch_losses", "total = batch_losses"),
    ("gn.py", "infinite weights with a finite loss accepted", "finite | (alpha == 0), loss, jnp.inf)", "finite | (alpha >= 0), loss, jnp.inf)"),
    ("gn.py", "NaN taken for the least loss", "total = jnp.where(jnp.isfinite(total), total, jnp.inf)", "total = jnp.where(jnp.isinf(total), jnp.inf, total)"),
    ("gn.py", "a step that is no better is taken", "jnp.append(0.0, alphas)", "jnp.append(alphas, 0.0)"),
    ("gn.py", "the guard not heard", "    if config.guard:", "    if True:"),
    ("gn.py", "a line search over the batch, whatever is asked", "for k in range(config.fresh_batches):", "for k in range(config.inner_steps):"),
    ("gn.py", "a line search that reads nothing where the tokens are few", "return max(1, round(", "return max(0, round("),
    ("gn.py", "tokens of a line search over no tokens of an inner batch", "            if not self.inner_tokens:", "            if False:"),
    ("gn.py", "the next inner loop starts from θ_{t+1}", "theta = jax.tree.map(partial(jnp.where, refused), params, state.theta)", "theta = params"),
    ("gn.py", "after a refused step the next inner loop starts from θ", "theta = jax.tree.map(partial(jnp.where, refused), params, state.theta)", "theta = state.theta"),
    ("gn.py", "momentum restarts each outer step", "opt = jax.tree.map(partial(jnp.where, refused), opt_anew, state.opt)", "opt = opt_anew"),
    ("gn.py", "momentum goes on after a refused step", "opt = jax.tree.map(partial(jnp.where, refused), opt_anew, state.opt)", "opt = state.opt"),
    ("gn.py", "the parameters decay, the iterate does not", "theta = optimizers.scale_matrices(theta, keep)", "pass"),
    ("gn.py", "the iterate decays, the parameters do not", "params = optimizers.scale_matrices(params, keep)", "pass"),
    ("gn.py", "a refused step decays", "jnp.where(refused, 1, 1 - config.parameter_weight_decay)", "1 - config.parameter_weight_decay"),
    ("gn.py", "an average over outer steps that counts each as one", "config.average**config.inner_steps", "config.average"),
    ("gn.py", "an average of the inner iterate over outer steps", "update_average(average, params, tau)", "update_average(average, theta, tau)"),
    ("gn.py", "the sums of the losses go on", "return State(params, theta, average, opt, state.t + 1, k, loss, inner_loss)", "return State(params, theta, average, opt, state.t + 1, k, state.loss, inner_loss)"),
    ("gn.py", "an average besides a line search by default", "0.0 if self.line_search else 0.999", "0.999"),
    ("gn.py", "lr of the first inner step for all", "lr = learning_rate(state.t, state.k, config)", "lr = learning_rate(state.t, 0, config)"),
    ("gn.py", "lr not heard", "return config.lr * run_rise * inner_rise * fall", "return 0.01 * run_rise * inner_rise * fall"),
    ("gn.py", "inner cosine one step ahead", "inner = progress(k / N,", "inner = progress((k + 1) / N,"),
    ("gn.py", "global cosine by outer steps", "run = progress((t + k / N) / steps,", "run = progress(t / steps,"),
    ("gn.py", "schedules exchanged", '"global cosine": lambda run, inner: cosine(run),', '"global cosine": lambda run, inner: cosine(inner),'),
    ("gn.py", "one cosine for two", "cosine(run) * cosine(inner)", "cosine(run * inner)"),
    ("gn.py", "warm-up counted in outer steps", "config.warmup * steps * N)", "config.warmup * steps)"),
    ("gn.py", "the cosine falls during the warm-up", "(t + k / N) / steps, config.warmup)", "(t + k / N) / steps, 0)"),
    ("gn.py", "the inner cosine falls during the inner warm-up", "progress(k / N, config.inner_warmup)", "progress(k / N, 0)"),
    ("gn.py", "the lr in the log is the last inner step's", 'metrics["lr"] = learning_rate(state.t, 0, config)', 'metrics["lr"] = learning_rate(state.t, N - 1, config)'),
    ("gn.py", "another schedule by default", 'schedule: str = "constant+inner cosine"', 'schedule: str = "global cosine"'),
    ("gn.py", "a momentum of one is let through", 'fractions = ["momentum", "warmup"', 'fractions = ["warmup"'),
    ("gn.py", "a negative line search is let through", "        super().check()\n", "        pass\n"),
    # gn_prox.py
    ("gn_prox.py", "L1 at z instead of z + v", "jax.value_and_grad(loss)(z + v, y)", "jax.value_and_grad(loss)(z, y)"),
    ("gn_prox.py", "L1 at z - v", "jax.value_and_grad(loss)(z + v, y)", "jax.value_and_grad(loss)(z - v, y)"),
    ("gn_prox.py", "the loss at θ instead of θ_t", "return loss(z, y), value, u", "return value, value, u"),
    ("gn_prox.py", "the gradient of Gauss-Newton", "delta, tokens, config, exact)", "delta, tokens, config)"),
    ("gn_prox.py", "a step of Gauss-Newton", "config, watch, value_and_grad)", "config, watch)"),
    ("gn_prox.py", "a line search by default", "line_search: int = 0", "line_search: int = 5"),
    ("gn_prox.py", "Gauss-Newton's schedule by default", 'schedule: str = "global cosine"', 'schedule: str = "constant+inner cosine"'),
    # layerwise_gn.py
    ("layerwise_gn.py", "layers 10 and 11 with layer 1, as by prefix", "streams.at[i].set(own(dp))", "streams.at[i if i < 10 else 1].add(own(dp))"),
    ("layerwise_gn.py", "a stream pulled one layer short", "map_first(to_input, cotangents, i)", "map_first(to_input, cotangents, max(i - 1, 0))"),
    ("layerwise_gn.py", "a stream pushed one layer short", "map_first(through, streams, i)", "map_first(through, streams, max(i - 1, 0))"),
    ("layerwise_gn.py", "a block's δ dropped", "streams.at[i].set(own(dp))", "streams.at[i].set(0 * own(dp))"),
    ("layerwise_gn.py", "the head's δ dropped", "objective(z, v_head, y)", "objective(z, 0 * v_head, y)"),
    ("layerwise_gn.py", "the head's δ in the gradient below it too", "for_each_stream(z, v, y)", "for_each_stream(z, v + v_head[None], y)"),
    ("layerwise_gn.py", "the loss at θ_t counted once a layer", "jnp.sum(L2s - ells)", "jnp.sum(L2s)"),
    ("layerwise_gn.py", "the head's part of the value dropped", " + (L2_head - ell)", ""),
    ("layerwise_gn.py", "all layers get the first one's cotangent", "to_params(cotangents[i])", "to_params(cotangents[0])"),
    ("layerwise_gn.py", "the final norm left out of the last layer", "h = model.rms_norm(h, final_norm)", "h = model.rms_norm(h, 0 * final_norm + 1)"),
    ("layerwise_gn.py", "--objective not heard", "objective = objective or OBJECTIVES[config.objective]", 'objective = objective or OBJECTIVES["quadratic"]'),
    ("layerwise_gn.py", "full Gauss-Newton after all", "config, watch, value_and_grad)", "config, watch)"),
    ("layerwise_gn.py", "another objective is let through", 'check_choice(self, "objective", OBJECTIVES)', "pass"),
    ("layerwise_gn.py", "five step sizes", "line_search: int = 10", "line_search: int = 5"),
    # gn_cg.py
    ("gn_cg.py", "curvature twice in the products", "jnp.vdot(v, Hv) / 2, Hv", "jnp.vdot(v, Hv) / 2, 2 * Hv"),
    ("gn_cg.py", "curvature's own value doubled", "jnp.vdot(v, Hv) / 2, Hv", "jnp.vdot(v, Hv), Hv"),
    ("gn_cg.py", "solves for +g", "optax.tree.scale(-1, g)", "optax.tree.scale(1, g)"),
    ("gn_cg.py", "solves on the first inner batch only", "batches(k), config, objective, value_and_grad)", "batches(0), config, objective, value_and_grad)"),
    ("gn_cg.py", "sums for means over inner batches", "optax.tree.scale(1 / config.inner_steps, total)", "total"),
    ("gn_cg.py", "stops early", "enough = 1e-20 *", "enough = 1e-4 *"),
    ("gn_cg.py", "--cg-steps not heard", "minus_g, config.cg_steps)", "minus_g, 3000)"),
    ("gn_cg.py", "no damping in the products", "return optax.tree.add_scale(G_delta, config.damping, delta)", "return G_delta"),
    ("gn_cg.py", "no damping in the value", "inner_loss += config.damping / 2", "inner_loss += 0 / 2"),
    ("gn_cg.py", "the value at θ_t", "_, inner_loss, _ = mean(gn.quadratic, delta)", "_, inner_loss, _ = mean(gn.quadratic, zero)"),
    ("gn_cg.py", "full Gauss-Newton whatever gradient is given", "f = partial(value_and_grad, config", "f = partial(gn.value_and_grad, config"),
    ("gn_cg.py", "steepest descent, not conjugate directions", "optax.tree.vdot(r, r) / before, p)", "0.0, p)"),
    ("gn_cg.py", "a solved step is solved again", "    if state.k == 0:", "    if True:"),
    ("gn_cg.py", "the step is taken whole, whatever α", "gn.between(state.params, state.theta, alpha)", "gn.between(state.params, state.theta, 1.0)"),
    ("gn_cg.py", "outer steps are not counted", "_replace(t=state.t + 1)", "_replace(t=state.t)"),
    ("gn_cg.py", "negative damping is let through", 'check_range(self, ["damping"], least=0)', "pass"),
    # optimizers.py
    ("optimizers.py", "a matrix in the wrong group", '"muon" if name in model.MATRICES else', '"muon" if name in model.MATRICES[:-1] else'),
    ("optimizers.py", "the head does not decay", 'name in ("embedding", "head")', 'name in ("embedding",)'),
    ("optimizers.py", "norms decay", 'return name in model.MATRICES or name in ("embedding", "head")', "return True"),
    ("optimizers.py", "clip 0 zeroes the update", "jnp.where(limit > 0, limit, jnp.inf)", "jnp.where(limit >= 0, limit, jnp.inf)"),
    ("optimizers.py", "one clip for both groups", 'return optax.partition({"muon": matrices, "adamw": others}, groups)', 'return optax.chain(clip_by_norm(clip), optax.partition({"muon": matrices, "adamw": others}, groups))'),
    ("optimizers.py", "Muon without its clip", "        clip_by_norm(clip),\n        nesterov", "        nesterov"),
    ("optimizers.py", "Muon without weight decay", "optax.add_decayed_weights(weight_decay),\n", "optax.add_decayed_weights(0.0),\n"),
    ("optimizers.py", "another b2 for Muon's other group", "others = adamw(lr, 0.9, 0.999,", "others = adamw(lr, 0.9, 0.95,"),
    ("optimizers.py", "Muon's axes exchanged", "reduction_axis=1, output_axis=2", "reduction_axis=2, output_axis=1"),
    ("optimizers.py", "Muon's momentum not Nesterov's", "return ahead, optax.EmaState(t, m)", "return optax.tree.bias_correction(m, b, t), optax.EmaState(t, m)"),
    ("optimizers.py", "momentum's bias of one step later", "m_unbiased = optax.tree.bias_correction(m, b, t + 1)", "m_unbiased = optax.tree.bias_correction(m, b, t + 2)"),
    ("optimizers.py", "the gradient's bias is left", "g_unbiased = optax.tree.bias_correction(g, b, t)", "g_unbiased = g"),
    ("optimizers.py", "Muon in bfloat16 always", 'if dtype == "bfloat16":', "if True:"),
    ("optimizers.py", "Muon in float32 always", 'if dtype == "bfloat16":', "if False:"),
    ("optimizers.py", "Adam's b2 not heard", "optax.adamw(lr, b1, b2,", "optax.adamw(lr, b1, 0.95,"),
    ("optimizers.py", "AdamW decays everything", "weight_decay=weight_decay, mask=is_matrix)", "weight_decay=weight_decay)"),
    ("optimizers.py", "AdamW without its clip", "return optax.chain(clip_by_norm(clip), rule)", "return rule"),
    ("optimizers.py", "SOAP's b1 and b2 exchanged", "scale_by_soap(b1, b2, frequency, largest),", "scale_by_soap(b2, b1, frequency, largest),"),
    ("optimizers.py", "second moment frozen between refreshes", "v = running_mean(state.v, rotated * rotated, b2)", "v = jnp.where(n % frequency == 0, running_mean(state.v, rotated * rotated, b2), state.v)"),
    ("optimizers.py", "first moment not carried into the new basis", "m = rotate(rotate_back(m, state.Q), Q)", "m = m"),
    ("optimizers.py", "second moment not reordered with its basis", "            v = jnp.take_along_axis(v,", "            _ = jnp.take_along_axis(v,"),
    ("optimizers.py", "factors exchanged", "factors = (L, R)\n", "factors = (R, L)\n"),
    ("optimizers.py", "a factor that forgets nothing", "L = running_mean(L, product(g, g.mT), b2)", "L = L + (1 - b2) * product(g, g.mT)"),
    ("optimizers.py", "no bias correction", "step = step * (jnp.sqrt(v_bias) / m_bias)", "pass"),
    ("optimizers.py", "the first gradient makes a step", "m = jnp.where(n == 0, 0, m)", "m = jnp.where(n < 0, 0, m)"),
    ("optimizers.py", "eigenvectors by rising eigenvalue", "return columns[:, ::-1]", "return columns"),
    ("optimizers.py", "a side as long as the largest keeps the identity", "a.shape[side - 2] <= largest", "a.shape[side - 2] < largest"),
    ("optimizers.py", "refreshed at every gradient", "n % frequency == 0, refreshed, kept)", "n >= 0, refreshed, kept)"),
    ("optimizers.py", "cosine from the start, warm-up or not", "(x - start) / (1 - start), 0, 1)", "x, 0, 1)"),
    ("optimizers.py", "a cosine that never comes to zero", "(1 + jnp.cos(jnp.pi * x)) / 2", "(2 + jnp.cos(jnp.pi * x)) / 3"),
    ("optimizers.py", "the rise begins at lr 0", "(step + 1) / jnp.maximum(1, steps)", "step / jnp.maximum(1, steps)"),
    ("optimizers.py", "average with 1 - τ for τ", "incremental_update(params, average, 1 - tau)", "incremental_update(params, average, tau)"),
    ("optimizers.py", "the weights, not their average", "state.params if state.average is None else state.average", "state.params"),
    ("optimizers.py", "norms are scaled too", "return factor * a if matrix else a", "return factor * a"),
    # baselines.py
    ("baselines.py", "cosine one step ahead", "progress(t / config.outer_steps", "progress((t + 1) / config.outer_steps"),
    ("baselines.py", "the cosine falls during the warm-up", "start = jnp.minimum(steps / config.outer_steps, 0.999)", "start = jnp.minimum(0.0, 0.999)"),
    ("baselines.py", "a number of warm-up steps not heard", "steps = float(config.warmup_steps) or config.warmup", "steps = config.warmup"),
    ("baselines.py", "a baseline's lr not heard", "return config.lr * rise(", "return 0.003 * rise("),
    ("baselines.py", "lr of the first step for all", "config.optimizer(learning_rate(state.t, config))", "config.optimizer(learning_rate(0, config))"),
    ("baselines.py", "sums for means over inner batches", "total / config.inner_steps, state.grad)", "total, state.grad)"),
    ("baselines.py", "sums for means over tokens in the gradient", "total / y.size, (loss, grad))", "total / y.size, (loss,)) + (grad,)"),
    ("baselines.py", "the head's gradient dropped", "    grad = grad | head_grad\n", ""),
    ("baselines.py", "only the last inner batch's loss", "loss=state.loss + loss, grad=grad)", "loss=loss, grad=grad)"),
    ("baselines.py", "only the last inner batch's gradient", "    grad = jax.tree.map(jnp.add, state.grad, grad)\n", ""),
    ("baselines.py", "one inner batch for all", "accumulate(state, batches(k), config)", "accumulate(state, batches(0), config)"),
    ("baselines.py", "begins the batch again when resumed", "range(int(state.k), config.inner_steps)", "range(0, config.inner_steps)"),
    ("baselines.py", "the average is overwritten", "update_average(state.average, params, config.average)", "update_average(params, params, config.average)"),
    ("baselines.py", "the average does not move", "State(params, average, opt, state.t + 1", "State(params, state.average, opt, state.t + 1"),
    ("baselines.py", "SOAP's b1 and b2 exchanged", "betas = (self.b1, self.b2)", "betas = (self.b2, self.b1)"),
    ("baselines.py", "Muon's momentum not heard", "optimizers.muon(lr, self.momentum,", "optimizers.muon(lr, 0.95,"),
    ("baselines.py", "AdamW's b2 not heard", "adamw(lr, self.b1, self.b2,", "adamw(lr, self.b1, 0.95,"),
    ("baselines.py", "a decay of one is let through", '["warmup", "average", "b1", "b2", "momentum"]', '["warmup", "average"]'),
    ("baselines.py", "no steps between refreshes let through", 'check_range(self, ["frequency", "largest"], least=1', 'check_range(self, ["frequency", "largest"], least=0'),
    ("baselines.py", "the next update waits for the device", "finish(state, config)._replace(k=np.int32(0)), metrics", "finish(state, config), metrics"),
    # model.py
    ("model.py", "no causal mask", "jnp.where(causal[None, None], scores, -jnp.inf)", "scores"),
    ("model.py", "softmax without subtraction of the maximum", "jax.nn.softmax(scores, axis=-1).astype", "(jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)).astype"),
    ("model.py", "scores over K", "/ K**0.5", "/ K"),
    ("model.py", "heads interleaved over groups", "k = jnp.repeat(k, shared_by, axis=2)", "k = jnp.tile(k, (1, 1, shared_by, 1))"),
    ("model.py", "the loss without subtraction of the maximum", "jax.nn.logsumexp(z, axis=1)", "jnp.log(jnp.sum(jnp.exp(z), axis=1))"),
    ("model.py", "queries are not rotated", "q = rotate(q.reshape(heads))", "q = q.reshape(heads)"),
    ("model.py", "the other sense of rotation in one half", "b_turned = a * sin + b * cos", "b_turned = b * cos - a * sin"),
    ("model.py", "one period for all entries", "10_000.0 ** (jnp.arange(half) / half)", "10_000.0 ** (0 * jnp.arange(half) / half)"),
    ("model.py", "no mean subtracted in LayerNorm", "rms_norm(x - mean, scale)", "rms_norm(x, scale)"),
    ("model.py", "no bias in LayerNorm", " + bias[None, None]", ""),
    ("model.py", "no residual around the MLP", "return h + mlp(config, p, rms_norm", "return mlp(config, p, rms_norm"),
    ("model.py", "the residual stream rounded to bfloat16", 'h = h + product(config, o, p["wo"])', 'h = wide(rounded(config, h) + product(config, o, p["wo"]))'),
    ("model.py", "attention's scores in bfloat16", '"bthk,bshk->bhts", wide(q), wide(k))', '"bthk,bshk->bhts", q, k)'),
    ("model.py", "GELU of numbers in bfloat16", 'up = wide(product(config, x, p["w_up"]))', 'up = product(config, x, p["w_up"])'),
    ("model.py", "no residual around attention", 'h = h + product(config, o, p["wo"])', 'h = product(config, o, p["wo"])'),
    ("model.py", "no final norm", 'return rms_norm(h, params["final_norm"])', "return h"),
    ("model.py", "gate and up exchanged", "active = jax.nn.silu(gate) * up", "active = jax.nn.silu(up) * gate"),
    ("model.py", "the other form of gelu", "jax.nn.gelu(up)", "jax.nn.gelu(up, approximate=False)"),
    ("model.py", "the mean over T + 1 tokens", "return total / y.size", "return total / tokens.size"),
    ("model.py", "std of the other side of a matrix", "normal(L, n_in, n_out) / n_in**0.5", "normal(L, n_in, n_out) / n_out**0.5"),
    ("model.py", "two matrices drawn alike", "jax.random.normal(next(keys), shape)", "jax.random.normal(key, shape)"),
    ("model.py", "labels not shifted", "return tokens[:, :-1], tokens[:, 1:]", "return tokens[:, :-1], tokens[:, :-1]"),
    ("model.py", "the head's own change dropped", 'dw = rounded(config, delta["head"])', 'dw = 0 * rounded(config, delta["head"])'),
    ("model.py", "the change of what the head reads dropped", "jnp.concatenate([dh, h], axis=1)", "jnp.concatenate([0 * dh, h], axis=1)"),
    ("model.py", "logits rounded to bfloat16", "return product(config, h, w, h.dtype)", "return product(config, h, w).astype(h.dtype)"),
    ("model.py", "chunks larger than head_chunk", "n = -(-B * T // config.head_chunk)", "n = max(1, B * T // config.head_chunk)"),
    ("model.py", "sums of the last chunk only", "return jax.tree.map(jnp.add, total, sums), out", "return sums, out"),
    ("model.py", "other heads at 150m", "n_heads=16, n_kv_heads=16", "n_heads=16, n_kv_heads=4"),
    ("model.py", "nothing is rounded", 'x.astype(jnp.bfloat16) if config.dtype == "bfloat16" else x', "x"),
    ("model.py", "heads of an odd width are let through", "if D % (2 * heads):", "if D % heads:"),
    ("model.py", "any number of key-value heads", "if heads % kv_heads:", "if False:"),
    # kernels/__init__.py
    ("kernels/__init__.py", "a kernel gets what it does not know", "if takes_over(kernel) and not options:", "if takes_over(kernel):"),
    ("kernels/__init__.py", "kernels on any GPU of NVIDIA", "return bool(cards) and min(cards) >= (8, 0)", "return bool(cards)"),
    ("kernels/__init__.py", "the newest card speaks for all", "min(cards) >= (8, 0)", "max(cards) >= (8, 0)"),
    ("kernels/__init__.py", "one card that is known is enough", "return capabilities() == {(9, 0)}", "return (9, 0) in capabilities()"),
    ("kernels/__init__.py", "kernels on a new card untried", "INTERPRET or tried() or kernel in passed", "INTERPRET or capable()"),
    ("kernels/__init__.py", "AMD's gfx942 is a number too", r're.fullmatch(r"(\d+)\.(\d+)", ', r're.search(r"(\d)\.?(\d)", '),
    # kernels/choice.py
    ("kernels/choice.py", "float32 on a TPU", 'if kernels.capable() or platforms == {"tpu"}:', "if kernels.capable():"),
    ("kernels/choice.py", "bfloat16 on any GPU", 'if kernels.capable() or platforms == {"tpu"}:', 'if platforms != {"cpu"}:'),
    ("kernels/choice.py", "known cards are tried again", "if kernels.tried() or not kernels.capable():", "if not kernels.capable():"),
    ("kernels/choice.py", "a kernel that failed is used", "        else:\n            kernels.passed.add(kernel)", "        kernels.passed.add(kernel)"),
    ("kernels/choice.py", "all lines of an error", r'str(error).partition("\n")[0]', "str(error)"),
    ("kernels/choice.py", "the pullback is not tried", "return value, push(*x), pull(value)", "return value, push(*x)"),
    ("kernels/choice.py", "what was left out is not named", "if left_out:", "if False:"),
    # kernels/derivative.py
    ("kernels/derivative.py", "the first cotangents for any arguments", "return [bars[i] for i in moving]", "return list(bars[: len(moving)])"),
    ("kernels/derivative.py", "the first changes for any arguments", "changes = [dx[i] for i in moving]", "changes = [dx[-1] for i in moving]"),
    # kernels/mlp.py
    ("kernels/mlp.py", "what a pullback needs kept for it", "x = jax.lax.optimization_barrier(x)", "x = tuple(x)"),
    ("kernels/mlp.py", "GELU of half the steepness", "(8 / jnp.pi) ** 0.5", "(2 / jnp.pi) ** 0.5"),
    # kernels/attention.py
    ("kernels/attention.py", "pushforward without the keys' change", "ds = dot(dqi, kj.T) + dot(qi, dkj.T)", "ds = dot(dqi, kj.T)"),
    ("kernels/attention.py", "pushforward without the mean of ds", "total - r[:, None] * load(o, i, K)", "total"),
    ("kernels/attention.py", "pushforward without the values' change", "dot(p_ds, vj) + dot(p.astype(vj.dtype), dvj)", "dot(p_ds, vj)"),
    ("kernels/attention.py", "pushforward that trusts the log-sum-exp", "load(o, i, K)) / n[:, None]", "load(o, i, K))"),
    ("kernels/attention.py", "the pushforward's mask one off", "jnp.arange(TILE)[:, None] >= jnp.arange(TILE)[None]", "jnp.arange(TILE)[:, None] > jnp.arange(TILE)[None]"),
    ("kernels/attention.py", "the pushforward's key-value head of another group", "(b, 0, h // shared_by, 0)", "(b, 0, h % shared_by, 0)"),
    ("kernels/attention.py", "tiles before the diagonal left out", "jax.lax.fori_loop(0, i, partial(add_tile", "jax.lax.fori_loop(1, i, partial(add_tile"),
    ("kernels/attention.py", "the scale of ds dropped", "p_ds = (p * ds * scale)", "p_ds = (p * ds)"),
    ("kernels/attention.py", "no mask where a tile reaches beyond the context", "if whole_rows and ref.shape[0] % TILE == 0:", "if whole_rows:"),
    # kernels/cross_entropy.py
    ("kernels/cross_entropy.py", "the largest logit of a tile only", "m = jnp.maximum(m_before, jnp.max(t))", "m = jnp.max(t)"),
    ("kernels/cross_entropy.py", "p·v not subtracted", "return p * (1 + read(v, j, 0).astype(z.dtype) - mean)", "return p * (1 + read(v, j, 0).astype(z.dtype))"),
    ("kernels/cross_entropy.py", "curvature's value without its square", "curvature = mean_square - mean * mean", "curvature = mean_square"),
    ("kernels/cross_entropy.py", "the label's 1 forgotten", "u = (values(j) - one).astype", "u = values(j).astype"),
    ("kernels/cross_entropy.py", "what is beyond a row counts", "return columns(j) < row.shape[0]", "return columns(j) < row.shape[0] + 1"),
    ("kernels/cross_entropy.py", "the exact loss at z, not at z + v", "lse = log_sum_exp(of_changed)", "lse = log_sum_exp(of_z)"),
    ("kernels/cross_entropy.py", "all changes of a row are the first", "lambda s, i: (s, i, 0)", "lambda s, i: (0 * s, i, 0)"),
    ("kernels/cross_entropy.py", "the loss's derivative without its label", "jnp.vdot(g, dz)", "jnp.vdot(jax.nn.softmax(z), dz)"),
    # kernels/heads.py
    ("kernels/heads.py", "nothing is rotated", "cos, sin = turn", "cos, sin = (1, 0)"),
    ("kernels/heads.py", "the other sense of rotation in one half", "a * sin + b * cos]", "b * cos - a * sin]"),
    ("kernels/heads.py", "no mean subtracted in LayerNorm", "x = [(a - mean) * inside for a in x]", "x = [a * inside for a in x]"),
    ("kernels/heads.py", "columns beyond a row in its variance", "(a - mean) * inside for a in x", "(a - mean) for a in x"),
    ("kernels/heads.py", "a kind's rows read at the first kind's place", "inputs = [Heads(ref, first, count, half) for ref in joint]", "inputs = [Heads(ref, 0, count, half) for ref in joint]"),
    ("kernels/heads.py", "a kind's cotangent written at the first kind's place", "output = Heads(made[0], first, count, half)", "output = Heads(made[0], 0, count, half)"),
    ("kernels/heads.py", "the norms' own change forgotten", "(dx, norms[n:])", "(dx, jax.tree.map(jnp.zeros_like, norms[n:]))"),
    ("kernels/heads.py", "the norms' gradient of one program only", "jnp.sum(a, axis=(0, 1)) for kind", "a[0, 0] for kind"),
    ("kernels/heads.py", "rows beyond the context counted", "rows_left = jnp.minimum(rows, T - rows * pl.program_id(0))", "rows_left = rows"),
    ("kernels/heads.py", "the norms' gradient in the wrong order", "x_bar, norms_bar = pull(u)", "x_bar, norms_bar = pull(u)\n    norms_bar = norms_bar[::-1]"),
    ("kernels/heads.py", "one angle too far", "angle = jnp.arange(T)[:, None]", "angle = 1 + jnp.arange(T)[:, None]"),
    # text/token_files.py
    ("text/token_files.py", "held-out documents beyond some count are trained on", '"val" if source.held_out or text in holdout else', '"val" if (source.held_out or text in holdout) and counts["val_tokens"] < 5000 else'),
    ("text/token_files.py", "documents held out by turn, not by hash", '"val" if source.held_out or text in holdout else', '"val" if counts["train_bytes"] % 20 == 19 or not counts["val_bytes"] else'),
    ("text/token_files.py", "validation files trained on", '"val" if source.held_out or text in holdout else', '"val" if text in holdout else'),
    ("text/token_files.py", "no end-of-text", "files[side].write(ids.tobytes() + end_of_text)", "files[side].write(ids.tobytes())"),
    ("text/token_files.py", "the text's hash is of nothing", 'return hashlib.file_digest(file, "sha256").hexdigest()', 'return "0"'),
    ("text/token_files.py", "a draft not cut to what was counted", 'files[side].truncate(2 * counts[f"{side}_tokens"])', "files[side].tell()"),
    ("text/token_files.py", "a document again after an interruption", 'islice(texts, documents_in(counts), None)', 'islice(texts, max(0, documents_in(counts) - 1), None)'),
    ("text/token_files.py", "a damaged token file is read", 'if counts and checksums(path, checksum_once) == counts["sha256"]:', "if counts:"),
    ("text/token_files.py", "more files than needed", "train_tokens >= need and", "train_tokens >= float('inf') and"),
    ("text/token_files.py", "a slice that ends with its file", "end = min(stop, self.ends[number])", "end = self.ends[number]"),
    ("text/token_files.py", "the document at the limit trained on", "hash_of(text) <= self.largest", "hash_of(text) < self.largest"),
    ("text/token_files.py", "damaged bytes that count as done", '    Path(f"{path}.progress").unlink(missing_ok=True)\n', ""),
    ("text/token_files.py", "finished files gone with a bad flag", "if not was_begun and not is_useful:", "if not is_useful:"),
    ("text/token_files.py", "ids beyond the vocabulary read", "if len(ids) < count or ids.max() >= self.vocab_size:", "if len(ids) < count:"),
    ("text/token_files.py", "a token file that ends early read", "if len(ids) < count or ids.max() >= self.vocab_size:", "if ids.max() >= self.vocab_size:"),
    ("text/token_files.py", "a checksum remembered though the file has changed", "remembered_checksum(path, stat.st_size, stat.st_mtime_ns)", "remembered_checksum(path, 0, 0)"),
    ("text/token_files.py", "checksums computed by every run", "remembered_checksum(path, stat.st_size, stat.st_mtime_ns)", "checksum(path)"),
    ("text/token_files.py", "names cut in characters", "os.fsencode(name)[:NAME_BYTES].decode(", "name[:NAME_BYTES].encode().decode("),
    ("text/token_files.py", "the same token files for another validation side", "[source.name, source.stamp, source.held_out]", "[source.name, source.stamp]"),
    ("text/token_files.py", "counts that were changed", 'if counts.pop("check", None) == digest(counts):', 'if counts.pop("check", None):'),
    ("text/token_files.py", "processes for a text that needs none", 'if workers.tokenizer.name == "bytes" or is_small:', "if is_small:"),
    # data.py
    ("data.py", "one window too many", "return (len(tokens) - 1) // context", "return len(tokens) // context"),
    ("data.py", "windows that skip a token", "[place]) * context\n", "[place]) * (context + 1)\n"),
    ("data.py", "every epoch in the same order", "np.random.default_rng((seed, epoch))", "np.random.default_rng((seed, 0))"),
    ("data.py", "batches that overlap", "range(index * size, (index + 1) * size)", "range(index, index + size)"),
    ("data.py", "the next batch read only when it is asked for", "if following < self.end:", "if False:"),
    ("data.py", "a batch beyond the end read", "if following < self.end:", "if True:"),
    ("data.py", "a file count where documents of the same files are held out", 'amount(files, "file") if files else "of the same files"', 'amount(files, "file")'),
    # text/documents.py
    ("text/documents.py", "a text edited in place is not prepared again", "stat.st_size, stat.st_mtime_ns))", "stat.st_size))"),
    ("text/documents.py", "a document again after a failure", "islice(read(), done, None)", "islice(read(), max(0, done - 1), None)"),
    ("text/documents.py", "pauses that never begin anew", "                done += 1\n                failures = 0\n", "                done += 1\n"),
    ("text/documents.py", "mistakes tried again", "except MISTAKES:", "except ():"),
    ("text/documents.py", "all files held out", "if len(validation) == len(readable):", "if False:"),
    ("text/documents.py", "files left out without a word", "    if others:\n", "    if False:\n"),
    ("text/documents.py", "nineteen minutes of pauses without a network", "            limits = first_pauses\n", "            limits = pauses\n"),
    ("text/documents.py", "no network taken for one", 'raise NoNetwork(f"no connection to {address}") from None', "pass"),
    # text/formats.py
    ("text/formats.py", "modules cut into documents", 'is_cut = path.suffix != ".py"', "is_cut = True"),
    ("text/formats.py", "a line that ends in another block lost", "unfinished = others[-1:]", "unfinished = []"),
    ("text/formats.py", "blank documents", "return [document] if document.strip() else []", "return [document]"),
    ("text/formats.py", "a byte order mark in the text", "file.seek(3 if start == codecs.BOM_UTF8 else 0)", "file.seek(0)"),
    ("text/formats.py", "the place of a wrong byte without what is unfinished", "place - len(unfinished) + error.start", "place + error.start"),
    ("text/formats.py", "the row before the one without text", 'reason = f"row {number}: {error}"', 'reason = f"row {number - 1}: {error}"'),
    # text/folders.py
    ("text/folders.py", "runs read as text", 'return {"config", "about"} <= set(config)', "return False"),
    ("text/folders.py", "token files read as text", 'if "00000.train.bin" in names:', "if False:"),
    ("text/folders.py", "hidden files read", 'entry.name.startswith(".") or ', ""),
    ("text/folders.py", "a file goes by the name of a link to it", "if real not in found or not reader(Path(found[real])):", "if True:"),
    ("text/folders.py", "links in a circle", "if real not in entered:", "if True:"),
    ("text/folders.py", "only the names of files tell what is held out", "for name in path.parts:", "for name in path.parts[-1:]:"),
    ("text/folders.py", "held out wherever the word is", "HELD_OUT.isdisjoint(map(last_word, name", "HELD_OUT.isdisjoint(re.split(r'[\\W_]+', name.lower())) or not HELD_OUT.isdisjoint(map(last_word, name"),
    ("text/folders.py", "gzipped settings of other programs end the run", '.endswith((".json", ".json.gz")):', '.endswith(".json"):'),
    ("text/formats.py", "a wrong byte before damage ends in a traceback", "            except DAMAGE:  # reading", "            except ZeroDivisionError:  # reading"),
    ("text/folders.py", "settings of other programs end the run", '    if not path.name.lower().endswith((".json", ".json.gz")):', '    if True:'),
    # text/tokenizer.py
    ("text/tokenizer.py", "one merge too many", "if number < end}", "if number <= end}"),
    # text/workers.py
    ("text/workers.py", "texts read far ahead", "if len(waiting) > 2 * self.processes:", "if False:"),
    ("text/workers.py", "a process killed that is no failure of the machine", "except BrokenProcessPool:", "except ():"),
    ("text/workers.py", "workers that import the program", '    sys.modules["__main__"] = types.ModuleType("__main__")\n', ""),
    ("text/workers.py", "workers that hear Ctrl-C", "signal.SIG_BLOCK, {signal.SIGINT}", "signal.SIG_BLOCK, set()"),
    ("text/workers.py", "workers that outlive their parent", "    threading.Thread(target=end_with_parent, daemon=True).start()\n", ""),
    ("text/workers.py", "a thread for each core in each worker", '    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy', "    pass  # NumPy"),
    # train.py
    ("train.py", "line search on the batch it was trained on", "session.batches(first + run.settings.inner_steps, ", "session.batches(first, "),
    ("train.py", "training reads the warm-up's batches again", "    first = run.warmup_batches + t * run.step_batches\n", "    first = t * run.step_batches\n"),
    ("train.py", "line search tokens not counted", "    batches = run.warmup_batches + t * run.step_batches\n", "    batches = run.warmup_batches + t * run.settings.inner_steps\n"),
    ("train.py", "evaluation on training text", "    text, context, size = session.corpus.val, run", "    text, context, size = session.corpus.train, run"),
    ("train.py", "other windows for another seed", "data.sequences(text, context, 0, numbers)", "data.sequences(text, context, run.config.seed, numbers)"),
    ("train.py", "evaluation skips its first windows", "numbers = range(first, min(first + size, windows))", "numbers = range(first + size, min(first + size, windows) + size)"),
    ("train.py", "the last windows weigh as a whole batch", "loss(run.network, params, tokens) * len(rows)", "loss(run.network, params, tokens) * size"),
    ("train.py", "evaluated weights are not the average", "evaluate(session, optimizers.weights(state))", "evaluate(session, state.params)"),
    ("train.py", "bits a byte in nats", "bits = val_loss / math.log(2)", "bits = val_loss"),
    ("train.py", "seconds and refusals since the last row lost", 'before.get("refused", 0) + refused', "refused"),
    ("train.py", "seconds of all steps in each row", "                metrics = {}\n", "                pass\n"),
    ("train.py", "diverged at the step after", '{"step": t, "val_loss": None', '{"step": t + 1, "val_loss": None'),
    ("train.py", "--tokens not heard where the model has steps", '    if "tokens" in given and "steps" not in given:\n', '    if False:\n'),
    ("train.py", "tokens that do not count in config.json", "        tokens = None  # the steps count\n", "        pass\n"),
    ("train.py", "a model's default length beside a target", '        values |= {"steps": None, "tokens": None}\n', "        pass\n"),
    ("train.py", "a target alone ends a run with a schedule over its length", "if config.steps is None and tied_by:", "if False:"),
    ("train.py", "the warm-up named for a length that the schedule needs", "    if warmup and not replace(settings, warmup=0.0).depends_on_length:\n", "    if warmup:\n"),
    ("train.py", "a run of another length is always another run", 'return ("out", "tokens") if tied_by else ("out", "tokens", "steps")', 'return ("out", "tokens")'),
    ("train.py", "a run of another length is always the same run", 'return ("out", "tokens") if tied_by else ("out", "tokens", "steps")', 'return ("out", "tokens", "steps")'),
    ("train.py", "an evaluation inside a step beyond the end", "    if checkpoint.is_beyond(state, run.last_step):\n        return rows\n", ""),
    ("train.py", "the lengths of a grid in any order", "for length in sorted(by_length)]", "for length in by_length]"),
    ("train.py", "a run lost when a flag that is worked out is added", "        if flag.default is None and name not in run.given:\n", "        if False:\n"),
    ("train.py", "a shorter command that changes config.json", "    if state is None or not checkpoint.is_beyond(state, run.last_step):\n", "    if True:\n"),
    ("train.py", "a lengthened run that only resumes", "    if state.t == steps_then and state.k == 0:\n", "    if False:\n"),
    ("train.py", "config.json without what was resolved", "values |= flags.values_of(settings, DERIVED)", "values |= {}"),
    ("train.py", "the warm-up's learning rate does not rise", '"schedule": "constant", "warmup": 0.1}', '"schedule": "constant", "warmup": 0.0}'),
    ("train.py", "stops before the target loss", 'rows[-1]["val_loss"] <= target_loss', 'rows[-1]["val_loss"] >= target_loss'),
    ("train.py", "members of a grid share a folder", "files.digest(sorted(changed.items()))[:6]", "files.digest([])[:6]"),
    ("train.py", "the warm-up of another text", '        session.corpus.meta["sha256"],\n', ""),
    ("train.py", "the warm-up of another learning rate", "        run.config.warmup_lr,\n", ""),
    ("train.py", "goes on with another text", '        values["corpus"] = corpus.meta["sha256"]\n', "        pass\n"),
    ("train.py", "a warm-up of twice its length", "        warmup_tokens = parameters\n", "        warmup_tokens = 2 * parameters\n"),
    ("train.py", "a warm-up of part of an inner batch", "round(warmup_tokens / inner_tokens) * inner_tokens", "warmup_tokens"),
    ("train.py", "a number of a method that is not in the log", "row = dict.fromkeys(ROW) | metrics", "row = dict.fromkeys(ROW) | {name: metrics.get(name) for name in ROW}"),
    ("train.py", "the dtype of a CPU everywhere", 'values["dtype"] = choice.default_dtype()', 'values["dtype"] = "float32"'),
    ("train.py", "a folder in use ends the grid", '            results.append("in use")\n', "            raise\n"),
    ("train.py", "a resumed bar begins at the step before", 'done = t0 * run.step_work + run.passes * int(state.k)', 'done = t0 * run.step_work'),
    ("train.py", "a tuned warm-up in place of the given one", 'if "warmup" in given and "warmup_steps" in values:', "if False:"),
    ("train.py", "flags of other methods are unknown", "if flag not in valid}", "if flag in valid}"),
    ("train.py", "line-search tokens in other units", '["inner_tokens"] = config.inner_batch * network.context', '["inner_tokens"] = config.inner_batch'),
    ("runtime/command.py", "all failures of the device as if of memory", ' and "RESOURCE_EXHAUSTED" in str(error):', ":"),
    ("train.py", "a lost warm-up begun anew", "begun = find_warm_up(run, unfinished(run), begun) or begun", "begun = begun"),
    ("train.py", "a warm-up that forgets where it was", "        for step in range(done, steps):", "        for step in range(steps):"),
    ("train.py", "a lost warm-up kept beside the run", '    checkpoint.remove(unfinished(run))\n    return found["params"]', '    return found["params"]'),
    ("train.py", "more inner batches than can be counted", "if run.batches >= 2**31:", "if False:"),
    # runtime/live.py
    ("runtime/live.py", "an older state saved over a newer one", "        self.write(state)\n        self.newest = None\n", "        self.write(state)\n"),
    ("runtime/live.py", "a second Ctrl-C waits like the first", "if not (first and self.waiting):", "if not self.waiting:"),
    ("runtime/live.py", "saved at the ends of outer steps only", "    if (number or due) and saver", "    if number and saver"),
    ("runtime/live.py", "the newest state lost to a signal", "    if (number or due) and saver", "    if due and saver"),
    ("runtime/command.py", "a signal that passes for a failure", "class Stop(BaseException):", "class Stop(Exception):"),
    ("runtime/command.py", "an error that nobody reads ends in a traceback", "                with suppress(OSError):", "                if True:"),
    ("runtime/command.py", "Python complains of what nobody reads", "            discard_unread()\n", "            pass\n"),
    ("runtime/command.py", "a closed stream's number is given away", "            os.open(os.devnull, os.O_RDWR)  # it", "            pass  # it"),
    ("runtime/command.py", "what is said on a closed stream is lost", "        sys.stderr = sys.stdout\n", "        sys.stderr = open(os.devnull, 'w')\n"),
    # runtime/checkpoint.py
    ("runtime/checkpoint.py", "rows after the checkpoint kept on resuming", 'if row["step"] <= end]', "if True]"),
    ("runtime/checkpoint.py", "a longer run's rows for a shorter one", "end = min(int(state.t), last_step)", "end = int(state.t)"),
    ("runtime/checkpoint.py", "diverged before it has", "        if not is_later:\n", "        if True:\n"),
    ("runtime/checkpoint.py", "config.json with the length of before", '        if config != saved["config"]:\n', "        if False:\n"),
    ("runtime/checkpoint.py", "a length refused without its reason", 'if name in reasons else ""', 'if not reasons else ""'),
    ("runtime/checkpoint.py", "checkpoints in half precision", "= parallel.whole(a)\n", '= parallel.whole(a).astype("f2").astype(a.dtype)\n'),
    ("runtime/checkpoint.py", "another run's folder taken over", "    if changes:\n        what", "    if not then:\n        what"),
    ("runtime/checkpoint.py", "the code's hash is of its names", '[path.name, path.read_text(encoding="utf-8")]', "[path.name]"),
    ("runtime/checkpoint.py", "other code is not said", "    if code_then != code():\n", "    if False:\n"),
    ("runtime/checkpoint.py", "a run lost when a flag is added", 'then = defaults | saved["config"]', 'then = saved["config"]'),
    ("runtime/checkpoint.py", "NaN in the log", "allow_nan=False", "allow_nan=True"),
    ("runtime/checkpoint.py", "a damaged checkpoint written over", "            os.replace(path, aside)\n", "            path.unlink()\n"),
    ("runtime/checkpoint.py", "one checkpoint only", "    if newest.exists():\n        previous", "    if False:\n        previous"),
    ("runtime/checkpoint.py", "what was written is not read", "if f.testzip():", "if False:"),
    ("runtime/checkpoint.py", "two runs in one folder", "if parallel.largest(taken):", "if False:"),
    ("runtime/checkpoint.py", "a flipped bit that ends in a traceback", "EOFError, RuntimeError, zipfile", "EOFError, zipfile"),
    ("runtime/checkpoint.py", "rows of a log that are none", "    if not all(map(is_row, rows)):\n", "    if False:\n"),
    ("runtime/checkpoint.py", "a draft of the warm-up stays", '        Path(f"{path}.draft").unlink(missing_ok=True)\n', ""),
    ("runtime/checkpoint.py", "a run that was killed before it began is refused", '{"lock", "config.json.draft"}', '{"lock"}'),
    ("runtime/checkpoint.py", "two runs that write one warm-up", "        if shared and jax.process_index() == 0:\n", "        if False:\n"),
    ("runtime/checkpoint.py", "numbers of another width without their cause", "        if without_width(there) == without_width(here):\n", "        if False:\n"),
    ("runtime/checkpoint.py", "the commit of a repository around the code", '    variables["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)\n', ""),
    ("runtime/checkpoint.py", "the commit of a git hook's repository", 'if not name.startswith("GIT_")}', "if name}"),
    ("runtime/checkpoint.py", "other settings of JAX are not said", "        if now.get(name) != value:\n", "        if False:\n"),
    ("runtime/checkpoint.py", "a folder in use that counts as free", "    refuse_taken(folder, taken)\n\n\ndef refuse_taken", "\n\ndef refuse_taken"),
    # runtime/files.py
    ("runtime/files.py", "a full disk without a name", "if error.errno is None or error.filename is not None:", "if True:"),
    ("runtime/files.py", "a file that was not finished stays", "                draft.unlink()\n", "                pass\n"),
    ("runtime/files.py", "two processes at once", "    lock = FileLock(path)\n", '    lock = FileLock(f"{path}{os.urandom(4).hex()}")\n'),
    ("runtime/files.py", "what a draft held before stays", 'with open(draft, "wb") as f:', 'with open(draft, "r+b" if draft.exists() else "wb") as f:'),
    ("runtime/files.py", "a draft renamed while it is open", "            if check:\n                check(draft)\n            os.replace(draft, path)", "                if check:\n                    check(draft)\n                os.replace(draft, path)"),
    ("runtime/files.py", "a folder that cannot be written is found out late", "    if not nearest.is_dir():\n", "    if False:\n"),
    ("runtime/files.py", "a lock that is only looked at is made", "    if not Path(path).exists():\n        return False\n", ""),
    ("runtime/files.py", "a wait that ends where the lock's folder is removed", "            continue  # its holder", "            raise  # its holder"),
    ("runtime/files.py", "a folder that is gone half made again", '    draft = Path(f"{path}.draft")\n', '    draft = Path(f"{path}.draft")\n    draft.parent.mkdir(exist_ok=True)\n'),
    # runtime/flags.py
    ("runtime/flags.py", "help of a field from the class above", "for base in reversed(cls.__mro__)", "for base in cls.__mro__"),
    ("runtime/flags.py", "a comment above a field is no help", '        if not line.lstrip().startswith("#"):\n            comment = []\n', "        comment = []\n"),
    ("runtime/flags.py", "NaN is in every range", '        if not math.isfinite(value):', '        if False:'),
    ("runtime/flags.py", "k is 1024", '"k": 10**3', '"k": 1024'),
    ("runtime/flags.py", "a grid of the first flag only", "itertools.product(*choices)", "zip(*choices)"),
    ("runtime/flags.py", "true is false", '{"true": True, "false": False}', '{"true": False, "false": True}'),
    ("runtime/flags.py", "a path with a comma is a grid", 'if name == "--out" or exists(text):', 'if name == "--out":'),
    ("runtime/flags.py", "a value that ends the flags", '                texts[name] = "--"\n', "                pass\n"),
    ("runtime/flags.py", "counts without end", " or abs(value) > 10**15", ""),
    ("runtime/flags.py", "no guess at a misspelled flag", 'elif word.startswith("-") and similar:', "elif False:"),
    ("runtime/flags.py", "no guess at a word without its flag", "if word in meant:", "if False:"),
    ("runtime/flags.py", "a default of another preset in the help", "default = defaults.get(name, flag.default)", "default = flag.default"),
    # runtime/report.py
    ("runtime/report.py", "tokens of the line search taken for all", "{last['tokens']:,} tokens, {last['tokens_line_search']:,} of", "{last['tokens_line_search']:,} tokens, {last['tokens']:,} of"),
    ("train.py", "every run is new", '    if state is None:\n        return "resumes', '    if True:\n        return "resumes'),
    ("train.py", "a finished run resumes", '    if state.t == run.last_step or reached(run.config.target_loss, rows):', '    if False:'),
    ("runtime/report.py", "columns for flags that do not differ", 'len({run.given[name] for run in runs}) > 1]', 'len({run.given[name] for run in runs}) > 0]'),
    ("runtime/report.py", "a flag changed without a word", "        if value == asked:\n", "        if True:\n"),
    # runtime/progress.py
    ("runtime/progress.py", "0% of a run without an end", "            if batches is None:\n", "            if False:\n"),
    ("runtime/progress.py", "the clock counts the compilation", '                bar.start_t += pause\n', '                pass\n'),
    ("runtime/progress.py", "compiling ever after", "        self.read[stage] += 1\n", "        self.read[stage] = 1\n"),
    ("runtime/progress.py", "a step that ends early leaves its bar behind", "bar.update(batches * self.inner_tokens - bar.n)", "pass"),
    ("runtime/checkpoint.py", "a state that another process cannot read", "        if parallel.largest(state is None):", "        if state is None:"),
    ("plot.py", "unfinished seeds count for the choice of the best", 'last = last[last.done | ~last.groupby("group").done.transform("any")]', "last = last[last.step >= 0]"),
    ("plot.py", "a seed that has just begun ends in a traceback", "if keep_common_steps(rows).alpha.notna().any():", "if rows.alpha.notna().any():"),
    ("bench.py", "Ctrl-C that a library catches is forgotten", "                results.append(result)\n                check_stopped()\n", "                results.append(result)\n"),
    ("text/token_files.py", "Ctrl-C that a library catches is forgotten", "            check_stopped()\n", "            pass\n"),
    ("runtime/command.py", "nohup is not heeded", "if before is signal.SIG_IGN or", "if False or"),
    ("runtime/progress.py", "bars begin at zero", '"initial": done * self.inner_tokens}', '"initial": 0}'),
    ("runtime/progress.py", "a bar as wide as the terminal", 'terminal_width() - 6}', 'terminal_width()}'),
    ("runtime/progress.py", "no word without a terminal", "        if text:\n            print(text, file=sys.stderr)", "        if text:\n            pass"),
    # runtime/parallel.py
    ("runtime/parallel.py", "sums for means", "return jax.lax.pmean(a, axis)", "return jax.lax.psum(a, axis)"),
    ("runtime/parallel.py", "sums for means of a spread gradient", "tiled=True) / mesh.size", "tiled=True)"),
    ("runtime/parallel.py", "every device reads all rows", "    if len(tokens) % mesh.size:\n", "    if len(tokens):\n"),
    ("runtime/parallel.py", "no averaging", "        if mesh.size < 2:\n            return f(*args)", "        if mesh.size < 9:\n            return f(*args)"),
    ("runtime/parallel.py", "cut along the smallest axis", "largest_axis = max(axes", "largest_axis = min(axes"),
    ("runtime/parallel.py", "--shard not heard", '"shard" if shard else "data"', '"data"'),
    ("runtime/parallel.py", "results whole on every device", "with_sharding_constraint(a, spec(mesh, a))", "with_sharding_constraint(a, PartitionSpec())"),
    ("runtime/parallel.py", "as many devices as there are, whatever the batch", "if inner_batch % (n * processes) == 0]", "if True]"),
    ("runtime/parallel.py", "a signal to another process not heard", "return of_all.max(axis=0)", "return of_all[0]"),
    ("runtime/parallel.py", "a device's part saved for the whole", "return multihost_utils.process_allgather(a, tiled=True)", "return np.asarray(a.addressable_data(0))"),
    ("runtime/parallel.py", "every process prints", "if jax.process_index() > 0:\n        sys", "if jax.process_index() > 9:\n        sys"),
    ("runtime/parallel.py", "the others do not wait for the first", "        wait_for(done[:1])\n", "        pass\n"),
    ("runtime/parallel.py", "every device orthogonalizes every matrix", "if mesh.size < 2 or len(stack) % mesh.size:", "if mesh.size < 9:"),
    ("runtime/parallel.py", "the momentum gathered along with the step", "        stack = place(mesh, stack)\n", ""),
    ("runtime/parallel.py", "one of several processes trains alone", "    if missing and not (srun or mpirun):", "    if False:"),
    ("runtime/parallel.py", "a process beyond the number of them", "if COUNT in given and int(given.get(INDEX, 0)) >= int(given[COUNT]):", "if False:"),
    ("runtime/parallel.py", "an address without a port", "    if not (host and port.isdecimal()):\n", "    if not host:\n"),
    ("runtime/parallel.py", "a flag added to the name of a file", "if has_gpu and not is_file_name(before) and", "if has_gpu and"),
    ("runtime/parallel.py", "a flag for GPUs where there is none", "if has_gpu and not", "if not"),
    ("runtime/parallel.py", "a file of flags not heard", "    if is_file_name(text):\n", "    if False:\n"),
    # sample.py
    ("sample.py", "the weights, not their average", '        field = ".average"\n', '        field = ".params"\n'),
    ("sample.py", "documents without end", "if following == tok.end_of_text:", "if False:"),
    ("sample.py", "the same words with every seed", "jax.random.key(seed), LENGTH", "jax.random.key(0), LENGTH"),
    ("sample.py", "settings of any kind", "if type(config[name]) is not flag.kind:", "if False:"),
    ("sample.py", "weights of other sizes", "        if difference:\n", "        if False:\n"),
    # plot.py
    ("plot.py", "a group is shown although one of its runs diverged", 'groupby(table.group).transform("all")', 'groupby(table.group).transform("any")'),
    ("plot.py", "the worst group of each method is shown", "ascending=[False, True]", "ascending=[False, False]"),
    ("plot.py", "a mean over the seeds that have come so far", "table[runs_with_step == runs]", "table[runs_with_step <= runs]"),
    ("plot.py", "a seed that never comes to the target is left out of the mean", "reached[~reached.group.isin(not_there.group)]", "reached[~reached.run.isin(not_there.run)]"),
    ("plot.py", "a run without a row ends it", "    rowless = [folder for folder in folders if not has_row(folder)]\n", "    rowless = []\n"),
    ("plot.py", "a folder of runs is none", "            found = sorted(path.iterdir())\n", "            pass\n"),
    ("plot.py", "a person's matplotlibrc in the figures", "matplotlib.rcdefaults()", "matplotlib.rcParams"),
    ("plot.py", "a folder of pictures that cannot be is found out late", "        files.check_writable(options.out)", "        Path(options.out)"),
    # bench.py
    ("bench.py", "rows kept at the end only", "                if config.json:\n                    write(", "                if config.json and row is chosen[-1]:\n                    write("),
    ("bench.py", "an empty file stays", "        if path.stat().st_size == 0:\n", "        if False:\n"),
    ("bench.py", "a file that cannot be made is found out late", "    path.touch(exist_ok=False)\n", "    path.parent\n"),
    # tutorial.py
    ("tutorial.py", "G without the - p pᵀ of H", "    H = jax.vmap(jnp.diag)(p) - p_pT  # [n, V, V]", "    H = jax.vmap(jnp.diag)(p)  # [n, V, V]"),
    ("tutorial.py", "products without λ", "        return G_delta + DAMPING * delta", "        return G_delta"),
    ("tutorial.py", "the pushforward of the MLP's head without dh", "            return h @ w, dh @ w + h @ dw, pull  # the logits, their change, the way back", "            return h @ w, h @ dw, pull  # the logits, their change, the way back"),
    ("tutorial.py", "Newton without the Hessian", '    matrices = {"gradient": identity, "Newton": newton, "Gauss-Newton": gauss_newton}', '    matrices = {"gradient": identity, "Newton": gauss_newton, "Gauss-Newton": gauss_newton}'),
    ("tutorial.py", "a line search that takes the worst step", "    return ALPHAS[jnp.argmin(losses_along(loss, theta, delta, ALPHAS))]", "    return ALPHAS[jnp.argmax(losses_along(loss, theta, delta, ALPHAS))]"),
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
    room = [path for path in every.values() if Path(path).parent.name == Path(file).parent.name]
    near = [every[Path(file).stem]] if Path(file).stem in every else room or [every["train"]]
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
