"""Texts are tokenized in order by many processes, which are small and end with their parent."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import AS_A_USER
from sample_text import CACHE, documents_of, needs_vocabulary

import data
from text.encoding import NONE, encode
from text.tokenizer import tokenizer
from text.workers import Workers

ROOT = Path(__file__).resolve().parents[2]
BYTES = tokenizer("bytes")
CHUNKS = [["the cat", "", "é" * n] for n in range(30)]


def ids_of(tokenizer, chunk):
    """Work for the workers: the ids of each text."""
    return [tokenizer.encode(text).tolist() for text in chunk]


def workers_alive():
    return multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 3])
def test_texts_are_tokenized_in_order_by_any_number_of_processes(processes):
    """They start when needed, stay, and hold few chunks at a time; they end with the block."""
    with Workers(BYTES, processes) as workers:
        assert not workers_alive()
        for _ in range(2):
            asked = []

            def chunks(asked=asked):
                for chunk in CHUNKS:
                    asked.append(chunk)
                    yield chunk

            done = 0
            for ids in workers.map(ids_of, chunks()):
                assert ids == ids_of(BYTES, CHUNKS[done])
                done += 1
                assert len(asked) <= done + 2 * processes
            assert done == 30 and len(workers_alive()) == processes
    assert not workers_alive()


def test_workers_end_where_their_caller_fails_or_is_stopped():
    def broken():
        yield CHUNKS[0]
        raise ValueError("no JSON")

    for chunks, error in ((CHUNKS, KeyboardInterrupt), (broken(), ValueError)):
        with pytest.raises(error), Workers(BYTES, 2) as workers:
            for _ in workers.map(ids_of, chunks):
                raise KeyboardInterrupt
        assert not workers_alive()


def test_what_the_work_raises_reaches_the_caller():
    with Workers(BYTES, 2) as workers:
        work = workers.map(ids_of, [["a"], [3], ["b"]])
        assert next(work) == [[97]]
        with pytest.raises(AttributeError, match="'int' object has no attribute 'encode'"):
            next(work)
    assert not workers_alive()


def test_a_worker_that_is_killed_is_said_and_one_that_hears_ctrl_c_goes_on():
    with Workers(BYTES, 2) as workers:
        work = workers.map(ids_of, CHUNKS * 1000)  # far more than are in hand
        next(work)
        for process in workers_alive():
            os.kill(process.pid, signal.SIGINT)
        assert len([next(work) for _ in range(60)]) == 60
        workers_alive()[0].kill()
        with pytest.raises(OSError, match="a process that tokenizes has ended; is the memory"):
            list(work)
    assert not workers_alive()


def test_a_worker_is_small():
    """It has none of the modules of the process that started it, such as JAX, and two threads."""
    with Workers(BYTES, 1) as workers:
        next(workers.map(partial(encode, largest=NONE), CHUNKS[:1]))
        modules = workers.pool.submit(eval, "set(__import__('sys').modules)").result()
        assert {"jax", "pytest", "data"} <= set(sys.modules)
        assert "numpy" in modules and not {"jax", "pytest", "data"} & modules
        if sys.platform == "linux":
            threads = workers.pool.submit(os.listdir, "/proc/self/task").result()
            assert len(threads) == 2  # one waits for the end of the parent


SITE = """
import sys
print("hello")
print("hello", file=sys.stderr)
"""
PROGRAM = """
import os, sys, time
print("program", flush=True)
from text.encoding import hashes
from text.tokenizer import tokenizer
from text.workers import Workers
if __name__ == "__main__":
    with Workers(tokenizer("bytes"), 2) as workers:
        for _ in workers.map(hashes, [["text"] * 64] * 50):
            pass
        print("done", flush=True)
        if sys.argv[1:] == ["wait"]:
            time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """Starts PROGRAM where every Python prints something before it does anything else."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environment = AS_A_USER | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    if CACHE.exists():
        environment["TIKTOKEN_CACHE_DIR"] = str(CACHE)

    def start(*words, program="program.py"):
        command = [sys.executable, tmp_path / program, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        where = {"cwd": tmp_path, "env": environment, "start_new_session": True}
        return subprocess.Popen(command, **pipes, **where)

    return start


def test_what_a_python_prints_disturbs_nothing_and_the_program_is_imported_once(start):
    said, _ = start().communicate(timeout=60)
    assert said.count("hello") >= 6  # the program, and two workers; each says it twice
    assert said.count("program") == said.count("done") == 1


def test_no_worker_outlives_a_parent_that_is_killed(start):
    """The pipe that all of them print to ends when the last of them has ended."""
    process = start("wait")
    while "done" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@needs_vocabulary
@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_command_ends_well_where_every_python_prints_something(start, tmp_path, is_stopped):
    """Also by Ctrl-C, which every process of a terminal hears, when its workers have begun."""
    rows = [json.dumps({"text": text}) + "\n" for text in documents_of(1000)]
    (tmp_path / "big.jsonl").write_text("".join(rows))
    process = start("big.jsonl", program=data.__file__)
    heard = 0
    while is_stopped and heard < 4:  # of this process and of the first worker
        line = process.stdout.readline()
        assert line, "it has ended"
        heard += line == "hello\n"
    if is_stopped:
        os.killpg(process.pid, signal.SIGINT)
    # The pipe that all of them print to ends when the last of them has ended.
    said, _ = process.communicate(timeout=60)
    status, says = 0, "to train on: 1 file, 950 documents"
    if is_stopped:
        status, says = 130, "data.py: stopped; the same command goes on from here"
    assert process.returncode == status and says in said and "Traceback" not in said
