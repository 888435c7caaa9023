"""Trains a LLaMA: `python train.py --method gn --model tiny`. `--help` lists every flag.

A run first warms up: AdamW takes steps on the first tokens, the same for all methods (Section 5).
Then its method takes outer steps. An outer step reads one batch, in parts that are called inner
batches. With Gauss-Newton it is Algorithm 1; with AdamW, Muon and SOAP it is one update. Now and
then the run evaluates the model on held-out text, and logs a row. The text is tokenized while the
run reads it.

Every batch is a function of seed and step. So a run that was stopped resumes with the same command
as if it had never been stopped. With more --steps, a finished run goes on from its end, if its
learning rate does not depend on its length.

Commas between the values of a flag make a grid: one run for each combination. recipe.py says what
a run is made of: its method, its flags and their defaults.
"""

import math
import shlex
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import baselines
import data
import model
import optimizers
from kernels import choice
from recipe import Run, configure_grid, defaults_of, flags_that_may_differ
from runtime import checkpoint, energy, files, flags, live, memory, parallel, report
from runtime.command import blaming_input, command, explain, say
from runtime.progress import Progress

# ---- a run in progress ---------------------------------------------------------------------------


class Session(NamedTuple):
    """A run in progress, with its text, its progress bars, its signals and its saves."""

    run: Run
    corpus: data.Corpus
    ahead: data.Ahead  # ahead(index): an inner batch on the devices; it reads the next meanwhile
    progress: Progress
    signals: live.Signals
    saver: live.Saver

    def safe_point(self):
        """Saves if it is time to, or if a signal came; then raises Stop if one did."""
        live.safe_point(self.signals, self.saver)

    def stop_if_asked(self):
        """A safe point while the run waits for text."""
        if jax.process_count() == 1:  # several must stop together, at the next inner batch
            self.safe_point()

    def batches(self, first, stage):
        """The function k -> inner batch number first + k of the run, int32 [B, T+1].

        stage: a word for what reads them, which the progress bar shows.
        """

        def batch(k):
            self.safe_point()
            self.progress.advance(stage)
            return self.ahead(first + k, self.stop_if_asked)

        return batch


def open_session(run, corpus, signals):
    """The Session of a run."""
    config = run.config
    save = partial(checkpoint.save_state, config.out)
    checked = set()  # the numbers of the text's groups whose hashes were compared

    def read(index):
        context = run.network.context
        batch = data.batch(corpus.train, context, config.inner_batch, config.seed, index)
        hashes = corpus.train.hashes
        if hashes.keys() - checked:  # seldom: a group lasts for thousands of batches
            checkpoint.check_text(config.out, hashes)
            checked.update(hashes)
        return parallel.put(run.mesh, batch, parallel.rows)

    return Session(
        run=run,
        corpus=corpus,
        ahead=data.Ahead(read, run.total_batches),
        progress=Progress(run.inner_tokens),
        signals=signals,
        saver=live.Saver(save, config.save_every),
    )


# ---- the warm-up ---------------------------------------------------------------------------------


def warm_up(session):
    """θ_0 and the last training loss: AdamW, one inner batch per step, on the first tokens.

    It is computed once for all runs that share it. If it is stopped, it resumes like any part of a
    run.
    """
    run = session.run
    params = model.init(run.network, jax.random.key(run.config.seed))
    params = parallel.put(run.mesh, params)
    if run.warmup_batches == 0:
        return params, None

    digest = warm_up_digest(session)
    path = Path("data") / f"warmup-{digest[:12]}.npz"
    like = {"params": params, "loss": jnp.zeros(()), "code": code_bytes()}
    with warm_up_lock(session, path):
        found = load_warm_up(run, path, like)
        if found is None:
            found = make_warm_up(session, params, digest)
            checkpoint.save(path, found, shared=True)
        else:
            checkpoint.warn_of_other_code(path, hash_of(found["code"]))
    checkpoint.remove(unfinished_warm_up(run))
    return found["params"], found["loss"]


@contextmanager
def warm_up_lock(session, path):
    """Holds the lock of a warm-up that runs share. Waits while another run has it.

    On a GPU, a warm-up that is made twice does not end with the same bits. A run of several
    processes does not wait: if one of them waited here, the others would give it up for lost.
    """
    lock = path.with_suffix(".lock")
    with ExitStack() as stack:
        if jax.process_count() == 1 and not files.hold(lock, stack):
            print("waits for another run, which makes the same warm-up")
            while not files.hold(lock, stack):
                session.safe_point()
                time.sleep(0.2)
        yield


def warm_up_digest(session):
    """A hash of all that decides how a warm-up ends, but for the code."""
    run = session.run
    return files.digest(
        sorted(flags.values_of(run.network).items()),
        run.config.inner_batch,
        run.config.seed,
        run.warmup_batches,
        run.config.warmup_lr,
        session.corpus.meta["sha256"],
        jax.__version__,
        checkpoint.jax_settings(),
        jax.devices()[0].device_kind,
    )


def code_bytes():
    """The hash of the code as an array, which is kept with a warm-up."""
    return np.frombuffer(bytes.fromhex(checkpoint.CODE), np.uint8)


def hash_of(code):
    """The hash that `code_bytes` has made an array of."""
    return np.asarray(code).tobytes().hex()


def unfinished_warm_up(run):
    """The path of the state of a warm-up that is not finished."""
    return Path(run.config.out) / "warmup.npz"


def load_warm_up(run, path, like):
    """The arrays of a warm-up's file, finished or not; None if there is none, or it is damaged.

    like: a tree of arrays as the file must have them.
    """
    found = None
    if path.exists():
        try:
            found = checkpoint.load(path, like)
        except ValueError as error:
            print(f"{error}; the warm-up is made again", file=sys.stderr)
    if parallel.in_any(found is None):
        return None
    return parallel.put(run.mesh, found)


def make_warm_up(session, params, digest):
    """The warm-up from params, or from where it was stopped: {"params", "loss", "code"}.

    digest: that of `warm_up_digest`. Raises FloatingPointError if the warm-up diverges.
    """
    run = session.run
    steps = run.warmup_batches
    settings = baselines.AdamW(
        network=run.network,
        inner_steps=1,
        outer_steps=steps,
        micro_batch=run.micro_batch,
        lr=run.config.warmup_lr,
        schedule="constant",
        warmup=0.1,
    )
    init = parallel.jit(baselines.init, static_argnums=1)
    # The digest is part of the arrays' names: what is left of another warm-up has other names, so
    # that it is not taken for a part of this one.
    at_start = {digest: {"state": init(params, settings), "code": code_bytes()}}
    found = load_warm_up(run, unfinished_warm_up(run), like=at_start)
    begun = (at_start if found is None else found)[digest]
    state, code = begun["state"], begun["code"]

    def save(state):
        checkpoint.save(unfinished_warm_up(run), {digest: {"state": state, "code": code}})

    session = session._replace(saver=live.Saver(save, run.config.save_every))
    done = int(state.t)
    with session.progress.bar("warm-up", steps, done):
        for step in range(done, steps):
            batches = session.batches(step, "gradients")
            state, metrics = baselines.update(state, batches, None, settings, session.saver.watch)
    made = {"params": state.params, "loss": metrics["train_loss"]}
    is_finite = [jnp.isfinite(array).all() for array in jax.tree.leaves(made)]
    if not all(is_finite):
        checkpoint.remove(unfinished_warm_up(run))
        give_up(run, [], 0, "the warm-up diverged; try a smaller --warmup-lr")
    return made | {"code": code}


# ---- training ------------------------------------------------------------------------------------


def train(session, state, rows):
    """Trains to the last outer step or to the target loss. Returns the rows of the log up to there.

    state, rows: where an earlier command stopped; None and [] begin with the warm-up. Raises Stop
    if a signal came, FloatingPointError if an evaluation or the warm-up is not finite.
    """
    run, config = session.run, session.run.config
    metrics = {}  # of the steps since the last row
    if state is None:
        state, metrics = first_state(session)
    print(report.header(), *map(report.table_row, rows), sep="\n")
    if checkpoint.is_beyond(state, run.last_step):
        return rows

    t0 = int(state.t)
    total = None if config.steps is None else config.steps * run.reads_per_step
    done = t0 * run.reads_per_step + int(state.k)
    with session.progress.bar(config.method, total, done):
        for t in range(t0, run.last_step + 1):  # the last round only records
            last = t == run.last_step
            due = last or t % config.eval_every == 0
            logged = bool(rows) and rows[-1]["step"] == t  # by an earlier command
            if due and not logged:
                record(session, state, t, metrics, rows)
                metrics = {}
            if last or reached(config.target_loss, rows):
                session.saver.save()
                break
            start = time.perf_counter()
            state, metrics = outer_step(session, state, t, metrics)
            session.progress.reach((t + 1) * run.reads_per_step)
            if t == t0 + 1:  # the second step, as the first one compiled, too
                say_time_left(session, t, time.perf_counter() - start)
    return rows


def say_time_left(session, t, seconds):
    """Says how long the run will still take, if it has a length.

    seconds: how long outer step t took.
    """
    steps = session.run.config.steps
    if steps is None:
        return
    seconds_left = seconds * (steps - t - 1)
    if seconds_left > 10:
        session.progress.write(report.time_left(seconds_left))


def first_state(session):
    """The method's state after the warm-up, and the metrics of the warm-up."""
    start = Meters.read(session)
    params, train_loss = warm_up(session)
    metrics = {"train_loss": train_loss} | start.spent(session, {})
    init = parallel.jit(session.run.method.module.init, static_argnums=1)
    return init(params, session.run.settings), metrics


def outer_step(session, state, t, before):
    """The state after outer step t of the method, and its metrics.

    before: metrics of earlier steps that are in no row yet. Costs and refusals are added up.
    """
    run = session.run
    update = run.method.module.update
    start = Meters.read(session)
    first = run.warmup_batches + t * run.batches_per_step
    batches = session.batches(first, "inner batches")
    fresh = session.batches(first + run.settings.inner_steps, "line search")
    with session.progress.bar(f"step {t + 1}", run.reads_per_step, int(state.k)):
        state, metrics = update(state, batches, fresh, run.settings, session.saver.watch)
        jax.block_until_ready(state)
    refused = int(metrics.get("alpha") == 0)
    metrics["refused"] = before.get("refused", 0) + refused
    metrics |= start.spent(session, before)
    return state, metrics


class Meters(NamedTuple):
    """A reading of the clock, of the time that went into waiting, and of the energy counters."""

    seconds: float
    waited: float  # seconds that this session has waited for batches
    joules: float | None  # of the GPUs; None where there is no counter

    @staticmethod
    def read(session):
        """The reading now."""
        return Meters(time.perf_counter(), session.ahead.waited, energy.joules())

    def spent(self, session, earlier):
        """What was used since this reading, as metrics; those of earlier steps are added."""
        now = Meters.read(session)
        metrics = {
            "seconds": earlier.get("seconds", 0) + now.seconds - self.seconds,
            "input_wait": earlier.get("input_wait", 0) + now.waited - self.waited,
        }
        if self.joules is not None and now.joules is not None:
            metrics["joules"] = earlier.get("joules", 0) + now.joules - self.joules
        return metrics


def record(session, state, t, metrics, rows):
    """Evaluates the state before outer step t and adds a row to the log. May save the state."""
    val_loss = evaluate(session, optimizers.weights(state))
    if not math.isfinite(val_loss):
        what = f"the loss is {val_loss} at outer step {t}; the last save is kept"
        give_up(session.run, rows, t, f"{what}; try {report.smaller_steps(session.run)}")
    rows.append(log_row(session, state, t, val_loss, metrics))
    checkpoint.write_log(session.run.config.out, rows)
    session.saver.after_outer_step(state)
    session.progress.write(report.table_row(rows[-1]))


# What a row of log.jsonl holds in any case, in this order. null: the method has no such number, or
# it is not finite. Sums are those since the last row, or since the run was resumed after it; the
# numbers of a method, such as the training loss, are those of the last step.
ROW = (
    "step",  # outer steps done
    "tokens",  # different ones read so far, by the warm-up, the steps and the line searches
    "tokens_line_search",  # those of the line searches
    "train_loss",  # nats per token
    "val_loss",  # nats per token
    "val_bpb",  # bits per byte of the held-out text
    "lr",  # learning rate of the method; of Gauss-Newton, of its inner optimizer
    "alpha",  # step size of the line search
    "inner_loss",  # mean of what the inner loop lowers, over its inner steps
    "seconds",  # of the steps, a sum; in the first row: of the warm-up, or of loading it
    "refused",  # steps that the line search refused, a sum
    "input_wait",  # seconds that steps waited for a batch, a sum
)
# Where the GPUs tell, a row has "joules", too: the energy of the steps, a sum.


def log_row(session, state, t, val_loss, metrics):
    """The row of log.jsonl of outer step t. Every number that a method's metrics hold is in it."""
    run, meta = session.run, session.corpus.meta
    # A method whose State has no `searched` reads all its fresh batches, if any, in every step.
    line_search_batches = int(getattr(state, "searched", t * run.settings.fresh_batches))
    batches_read = run.warmup_batches + t * run.settings.inner_steps + line_search_batches
    bits = val_loss / math.log(2)  # per token

    row = dict.fromkeys(ROW) | metrics
    row["step"] = t
    row["tokens"] = batches_read * run.inner_tokens
    row["tokens_line_search"] = line_search_batches * run.inner_tokens
    row["val_loss"] = val_loss
    row["val_bpb"] = bits * meta["val_tokens"] / meta["val_bytes"]
    return {name: plain(value) for name, value in row.items()}


def plain(number):
    """A number as JSON can hold it: of Python's own types; None if it is not finite."""
    if number is None:
        return None
    if not isinstance(number, int):
        number = float(number)  # an array
    return number if math.isfinite(number) else None


def evaluate(session, params):
    """Mean loss in nats per token on held-out windows.

    They are the same windows at every step, for every seed and for every size of an inner batch.
    """
    run = session.run
    text = session.corpus.val
    context = run.network.context
    at_once = run.config.inner_batch
    count = min(run.config.eval_tokens // context, data.windows(text, context))
    count = max(1, count)
    seed = 0  # not that of the run
    total = 0.0
    for first in range(0, count, at_once):
        session.safe_point()
        session.progress.show("evaluation")
        numbers = range(first, min(first + at_once, count))
        tokens = data.sequences([text], context, seed, numbers)
        tokens = parallel.put(run.mesh, tokens, parallel.rows)
        total += mean_loss(run.network, params, tokens, run.micro_batch) * len(numbers)
    return float(total) / count


@partial(jax.jit, static_argnames=("network", "micro_batch"))
def mean_loss(network, params, tokens, micro_batch=0):
    """Mean loss in nats per token on tokens, int32 [B, T+1]; micro_batch: see parallel.mean."""
    return parallel.mean(partial(model.loss, network), micro_batch)(params, tokens)


def reached(target_loss, rows):
    """Whether the last row of the log is at or below the target loss, if there is one."""
    if target_loss is None or not rows:
        return False
    return rows[-1]["val_loss"] <= target_loss


def give_up(run, rows, t, message):
    """Notes in the log that the run diverged at outer step t. Raises FloatingPointError."""
    row = {"step": t, "val_loss": None, "diverged": message}
    checkpoint.write_log(run.config.out, [*rows, row])
    raise FloatingPointError(message)


# ---- the command ---------------------------------------------------------------------------------


def check_places(runs):
    """Raises OSError if a folder cannot be written, InUse if the only run is in use.

    Both would otherwise be found when the text has been tokenized, which may take hours.
    """
    for run in runs:
        files.check_writable(run.config.out)
    if len(runs) == 1:
        checkpoint.check_free(runs[0].config.out)


def prepare_all(runs):
    """The text of each run, a list of data.Corpus. Raises ValueError if one is missing or short.

    What the warm-up reads is tokenized now, as the hash of this text tells whether an earlier run
    has made the same warm-up. The rest is tokenized while the run trains.
    """
    prepare_once = cache(data.prepare)  # the runs of a grid may have one text
    tokens_of_longest = max(run.total_batches * run.inner_tokens for run in runs)

    def find_all():
        corpora = []
        for run in runs:
            corpus = prepare_once(
                run.config.data,
                run.tokenizer,
                run.network.context,
                need=run.config.warmup_tokens,
                read_at_most=tokens_of_longest,
                makes_groups=jax.process_index() == 0,
            )
            corpora.append(corpus)
        return corpora

    return parallel.first(find_all, "data")


def execute_all(runs, corpora, signals):
    """The runs of a grid one after another, and their table.

    Returns for each the rows of its log, or a word that says why it has none. A run whose folder is
    in use is left to the process that works there. If the machine fails in one run, for example for
    lack of memory, the others follow all the same.
    """
    results = []
    for number, (run, corpus) in enumerate(zip(runs, corpora, strict=True), 1):
        print(f"\n---- run {number} of {len(runs)}: {run.config.out}")
        forget_programs()
        try:
            results.append(hold_and_execute(run, corpus, signals))
        except checkpoint.InUse:
            say(f"train.py: {run.config.out} is in use by another command, and is left to it")
            results.append("in use")
        except Exception as error:
            status, reason = explain(error)
            if status != 1 or jax.process_count() > 1:  # other processes would wait for this one
                raise
            say(f"train.py: {reason}")
            results.append("failed")
    report.print_grid(runs, results)
    return results


def forget_programs():
    """Frees the compiled programs of the last run: a process on a CPU can map only so many."""
    if jax.default_backend() == "cpu":
        jax.clear_caches()


def hold_and_execute(run, corpus, signals):
    """Holds a run's folder and executes the run. Returns the rows of its log, or "diverged".

    Raises InUse, or BadInput if the folder has come to hold anything else.
    """
    with ExitStack() as stack:
        with blaming_input():
            stack.enter_context(checkpoint.alone(run.config.out))
            check_folder(run, corpus)  # again: no other process can change it any more
        try:
            return execute(run, corpus, signals)
        except FloatingPointError as error:
            say(f"train.py: {error}")
            return "diverged"


def check_folder(run, corpus=None):
    """Raises ValueError if the run's folder holds anything but this run, shorter or longer."""
    must_be = saved_flags(run, corpus)
    for name in flags_that_may_differ(run.length_reason):
        del must_be[name]
    reasons = {"steps": f"on which the learning rate depends: {run.length_reason}"}
    checkpoint.check_folder(run.config.out, must_be, defaults_of(run), reasons)


def saved_flags(run, corpus=None):
    """What config.json has of a run: its flags, with None for the folder, and its text's hash."""
    values = run.values | {"out": None}
    if corpus:
        values["corpus"] = corpus.meta["sha256"]
    return values


def execute(run, corpus, signals):
    """Starts or resumes a run whose folder is held. Returns the rows of its log at the end."""

    def new_state():
        params = model.init(run.network, jax.random.key(0))
        return run.method.module.init(params, run.settings)

    state, rows = checkpoint.resume(run.config.out, new_state, run.last_step)
    begun = describe_begun(run, state, rows)
    state = parallel.put(run.mesh, state)
    parallel.wait()  # or another process would find the folder half made
    open_folder(run, corpus, state)
    # Tries the kernels on a kind of GPU that they were not tried on.
    choice.choose(run.network, model.shapes(run.network))
    with jax.set_mesh(run.mesh):
        run, memory_needed = fit_memory(run, new_state)
    tokens_in_text = None if corpus.meta["later_files"] else corpus.train.tokens_in_windows()
    kernels = choice.forms(run.network)
    text = data.describe(corpus.meta)
    report.print_opening(run, kernels, memory_needed, text, tokens_in_text, begun)
    with jax.set_mesh(run.mesh), signals.deferred():
        rows = train(open_session(run, corpus, signals), state, rows)
    report.print_summary(run, rows)
    return rows


def fit_memory(run, new_state):
    """The run with the largest micro-batch that fits into a device, and the MiB that it needs.

    new_state: makes the method's state; it is only traced. Returns the run as it is, and None, in
    three cases: --micro-batch is given; the devices do not say how much memory they have; or the
    method cannot be cut, as its Config has no micro_batch, or its module no function `lower`, which
    returns the method's largest program before it is compiled.
    """
    can_be_cut = hasattr(run.method.module, "lower") and hasattr(run.settings, "micro_batch")
    if run.config.micro_batch or not can_be_cut:
        return run, None
    # All processes must compile the same programs: those for the smallest device. 0: not known.
    limit = parallel.smallest(memory.available() or 0)
    if limit == 0:
        return run, None

    shape = (run.config.inner_batch, run.network.context + 1)
    inner_batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    tokens = parallel.shapes(run.mesh, inner_batch, parallel.rows)
    state = parallel.shapes(run.mesh, jax.eval_shape(new_state))

    def lower(size):
        return run.method.module.lower(state, tokens, replace(run.settings, micro_batch=size))

    sequences = run.config.inner_batch // run.mesh.size
    size, needed = memory.find_micro_batch(sequences, lower, limit)
    return run._replace(settings=replace(run.settings, micro_batch=size)), needed


def describe_begun(run, state, rows):
    """What an earlier command has done of a run, in words."""
    if state is None:
        return "resumes in its warm-up" if unfinished_warm_up(run).exists() else "a new run"
    if checkpoint.is_beyond(state, run.last_step):
        return f"has {state.t} steps already; these are its rows up to step {run.last_step}"
    if state.t == run.last_step or reached(run.config.target_loss, rows):
        return "finished by an earlier command"
    steps_then = checkpoint.read_config(run.config.out)["config"].get("steps")
    if state.t == steps_then and state.k == 0:
        return f"finished at {state.t} steps by an earlier command; goes on {report.goal(run)}"
    return f"resumes in outer step {state.t + 1}"


def open_folder(run, corpus, state):
    """Creates the folder of a run. If it is there, and will be longer, says so in config.json."""
    renewed = ()
    if state is None or not checkpoint.is_beyond(state, run.last_step):
        renewed = ("steps", "tokens")
    checkpoint.open_folder(run.config.out, saved_flags(run, corpus), renewed)


def train_all(words):
    """Trains the runs that a command line describes, and returns the exit status."""
    signals = live.Signals()
    with ExitStack() as stack:
        with blaming_input():
            parallel.start()  # before our signal handlers, as it sets one of its own
            stack.enter_context(signals)
            files.check_writable("data")  # or JAX would warn of each program that it cannot keep
            checkpoint.keep_programs("data/compiled")
            about = __doc__ or ""  # python -OO leaves docstrings out
            runs = configure_grid(words, about)
            for run in runs:
                check_folder(run)
            check_places(runs)
            corpora = prepare_all(runs)
            for corpus in corpora:
                stack.callback(corpus.train.close)
            for run, corpus in zip(runs, corpora, strict=True):
                check_folder(run, corpus)
        if len(runs) > 1:
            results = execute_all(runs, corpora, signals)
        else:
            results = [hold_and_execute(runs[0], corpora[0], signals)]
            folder = runs[0].config.out
            if isinstance(results[0], list):
                report.print_next_commands(folder, shlex.quote(folder))
    has_run = any(isinstance(result, list) for result in results)
    return 0 if has_run else 1


@command
def main(words):
    """Runs the command line."""
    return train_all(words)


if __name__ == "__main__":
    sys.exit(main())
