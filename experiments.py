"""Trains the runs behind RESULTS.md: `python experiments.py tiny` trains those that are missing.

An experiment is a list of commands of train.py, many of them grids. Its runs are trained one after
another. A run that has come to its end, or has diverged, is added to the file results/NAME.jsonl. A
run that this file has is not trained again. So an experiment can be done in pieces: the same
command continues it, also on another machine that has the file. Several commands may run at once,
such as one for each GPU: each takes the next run that no other is training.

    python experiments.py                           lists the experiments and how far they are
    python experiments.py tiny                      trains what is missing of one
    python experiments.py 5m-grids --data TEXT --minutes 9      saves and stops after 9 minutes
    CUDA_VISIBLE_DEVICES=1 python experiments.py 5m-grids --data TEXT      beside it, on another GPU
    python experiments.py --pack results/my.jsonl runs/*        keeps runs that train.py made

`python plot.py results/*.jsonl` then draws them, and renews the figures and tables of the pages.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

import comparison
import data
import recipe
import stand_ins
import train
from runtime import files, flags, packed, parallel
from runtime.command import BadInput, Stop, blaming_input, command, say
from runtime.live import Signals


class Experiment(NamedTuple):
    """Runs that answer a question."""

    question: str
    common: str  # flags of all its commands
    commands: str  # the other flags of train.py: a line for each run or grid
    program: Any = train  # the module whose main trains a run; its flags are those of train.py


EXPERIMENTS = {}

# ---- tiny: 20 steps of 131k tokens, 20 tokens per parameter --------------------------------------

TINY = "--model tiny --steps 20 --dtype float32"

EXPERIMENTS["tiny"] = Experiment(
    "How many steps does each method need, at the best settings of tiny-grids?",
    TINY,
    "--method gn,gn_prox,layerwise_gn,soap,muon,adamw --seed 0,1,2",
)

EXPERIMENTS["tiny-variants"] = Experiment(
    "Where should an inner loop start, and is one pass over a batch enough (Section 5.1)?",
    TINY,
    "--method gn --restart false,true --inner-epochs 1,2 --seed 0,1,2",
)

# The second line has one step size, α = 1, so that it is as without a line search.
EXPERIMENTS["tiny-stand-ins"] = Experiment(
    "Which stand-in for the loss is wrong where a step of Gauss-Newton goes too far?",
    f"{TINY} --method gn --schedule 'global cosine' --lr 0.02 --seed 0,1,2",
    """
--line-search 5
--alphas 1 --guard false
""",
    program=stand_ins,
)

EXPERIMENTS["tiny-line-search"] = Experiment(
    "Does Gauss-Newton need its line search (Appendix D)?",
    f"{TINY} --method gn --schedule 'global cosine' --seed 0,1,2",
    """
--line-search 5 --average 0 --lr 0.02
--line-search 0 --average 0 --lr 0.02
--line-search 0 --average 0.99 --lr 0.001,0.003,0.006,0.01,0.02
""",
)

EXPERIMENTS["tiny-average"] = Experiment(
    "Is a step better if the line search goes to the mean of the inner iterates?",
    f"{TINY} --method gn --schedule 'global cosine' --line-search 5",
    """
--average 0,0.97 --lr 0.02,0.03 --seed 0,1,2
--average 0.99 --lr 0.02
--average 0.9,0.99 --lr 0.03
--average 0,0.9,0.97 --lr 0.06
""",
)

EXPERIMENTS["tiny-grids"] = Experiment(
    "What is the best setting of each method, on tiny?",
    TINY,
    """
--method gn --schedule 'global cosine' --lr 0.003,0.01,0.015,0.02,0.03
--method gn --schedule 'constant+inner cosine' --lr 0.003,0.01,0.03
--method gn --schedule 'global+inner cosine' --lr 0.01
--method gn --schedule 'global cosine' --lr 0.02 --momentum 0.9 --damping 0,0.001
--method gn --schedule 'global cosine' --lr 0.003,0.01 --inner adamw
--method gn_prox --schedule 'global cosine' --average 0.99 --lr 0.01,0.015,0.02,0.03
--method gn_prox --schedule 'global cosine' --average 0,0.999 --lr 0.01
--method gn_prox --schedule 'constant+inner cosine' --average 0.99 --lr 0.01,0.02
--method layerwise_gn --schedule 'global cosine' --lr 0.003,0.01,0.015,0.02,0.03,0.05
--method layerwise_gn --schedule 'constant+inner cosine' --lr 0.003,0.01
--method layerwise_gn --schedule 'global cosine' --lr 0.01 --objective exact
--method soap --schedule constant --b2 0.7 --warmup-steps 10 --average 0.3 --lr 0.02,0.03,0.05
--method soap --schedule constant --b2 0.7 --warmup-steps 6 --average 0.3 --lr 0.02,0.04
--method soap --schedule constant --b2 0.7 --warmup-steps 6 --average 0,0.5 --lr 0.01,0.03
--method soap --schedule constant --b2 0.9 --warmup-steps 6 --lr 0.01,0.03,0.1
--method soap --schedule constant,cosine --b2 0.9 --lr 0.01,0.03
--method soap --schedule constant --b1 0.95 --b2 0.9 --warmup-steps 10 --average 0.3 --lr 0.02,0.03
--method muon --schedule constant --momentum 0.9 --warmup-steps 6 --average 0.4 --lr 0.05,0.06,0.07
--method muon --schedule constant --momentum 0.9 --warmup-steps 6 --average 0.4 --lr 0.08,0.1,0.15
--method muon --schedule constant --momentum 0.9 --warmup-steps 6 --lr 0.05,0.07,0.1
--method muon --schedule constant --momentum 0.9 --warmup-steps 10 --average 0.4 --lr 0.06,0.08
--method muon --schedule constant --momentum 0.95 --warmup-steps 6 --average 0.3 --lr 0.07,0.1
--method muon --schedule cosine --momentum 0.9 --warmup-steps 6 --lr 0.07,0.1,0.15
--method adamw --schedule constant --b2 0.99 --warmup-steps 10 --average 0.3 --lr 0.01,0.015
--method adamw --schedule constant --b2 0.99 --warmup-steps 10 --lr 0.005,0.01,0.015,0.02
--method adamw --schedule constant --b2 0.99 --warmup-steps 14 --lr 0.005,0.01,0.015
--method adamw --schedule constant --b2 0.95 --warmup-steps 6 --average 0,0.5 --lr 0.01,0.03
--method adamw --schedule cosine --b2 0.95 --warmup-steps 6 --lr 0.01,0.03
""",
)

# The last line is the bound of Section 5: Muon on the true loss, with a batch of one inner batch.
EXPERIMENTS["tiny-batches"] = Experiment(
    "What does a larger batch change, if the tokens stay as many (Section 6.1.2)?",
    "--model tiny --tokens 2621440 --dtype float32",
    """
--method gn --batch 16384,32768,65536,131072,262144 --lr 0.02,0.01
--method gn_prox --batch 16384,32768,65536,131072,262144 --lr 0.015,0.0075
--method layerwise_gn --batch 16384,32768,65536,131072,262144 --lr 0.03,0.015
--method soap --batch 16384,32768,65536,131072,262144 --lr 0.03,0.015
--method muon --batch 16384,32768,65536,131072,262144 --lr 0.06,0.03
--method adamw --batch 16384,32768,65536,131072,262144 --lr 0.015,0.0075
--method soap --batch 262144 --warmup-steps 2,5 --lr 0.03,0.06
--method muon --batch 262144 --warmup-steps 2,4 --lr 0.06,0.12
--method adamw --batch 262144 --warmup-steps 2,5 --lr 0.015,0.03
--method muon --batch 1024 --schedule cosine --lr 0.02,0.01
""",
)

EXPERIMENTS["tiny-batch-seeds"] = Experiment(
    "How much higher does each method end with a larger batch, at seeds that chose nothing?",
    "--model tiny --tokens 2621440 --eval-every 80 --seed 1,2,3 --dtype float32",
    """
--method gn --batch 32768,262144 --lr 0.02
--method gn_prox --batch 32768,262144 --lr 0.015
--method soap --batch 32768,262144 --lr 0.03
--method muon --batch 32768,262144 --lr 0.06
--method muon --batch 262144 --lr 0.06 --warmup-steps 4
--method adamw --batch 32768,262144 --lr 0.015
--method layerwise_gn --batch 32768,262144 --lr 0.03
""",
)

# ---- 5m, most with batches of 4m or 12m tokens ---------------------------------------------------

# The runs in results/ read books and manuals, which are not part of this project. --data names a
# text of your own; without it, these runs read C4. All runs of a file must read one text.

# The line search may read 500k tokens, which is an eighth of 4m and a 24th of 12m; on 45m, too.
GN = "--method gn --line-search-tokens 500k"
LAYERWISE = "--method layerwise_gn --line-search-tokens 500k"
FIVE_M_PROX = "--method gn_prox --schedule 'global cosine'"
FIVE_M_SOAP = "--method soap --schedule constant --warmup-steps 5"
FIVE_M_MUON = "--method muon --schedule constant --warmup-steps 5"
FIVE_M_ADAMW = "--method adamw --schedule constant --warmup-steps 5"

# Without --steps, a run has 25 steps, which read 100m tokens: 20 per parameter. Warm-up and line
# searches read at most 18m more.
FIVE_M_4M = "--model 5m --batch 4m --dtype bfloat16"

EXPERIMENTS["5m-grids"] = Experiment(
    "What is the best setting of each method, at 5m and 4m tokens a batch?",
    FIVE_M_4M,
    f"""
{GN} --schedule 'global cosine' --lr 0.003,0.006,0.01,0.03
{GN} --schedule 'global cosine' --line-search 10 --lr 0.01,0.02
{GN} --schedule 'constant+inner cosine' --lr 0.003,0.01
{GN} --schedule 'constant+inner cosine' --lr 0.01 --restart true
{GN} --schedule 'global cosine' --lr 0.01 --damping 0.0001
{GN} --schedule 'global cosine' --lr 0.003 --inner adamw
--method gn --line-search 0 --average 0.99 --schedule 'global cosine' --lr 0.003,0.01
--method gn --line-search 0 --average 0 --schedule 'global cosine' --lr 0.003
{FIVE_M_PROX} --average 0 --lr 0.003,0.01,0.02,0.03
{FIVE_M_PROX} --average 0.99 --lr 0.01,0.02
--method gn_prox --schedule 'constant+inner cosine' --average 0.99 --lr 0.01
{LAYERWISE} --schedule 'global cosine' --lr 0.003,0.01,0.03
{LAYERWISE} --schedule 'constant+inner cosine' --lr 0.003,0.01
--method soap --schedule constant,cosine --warmup-steps 5 --lr 0.003,0.01,0.03
{FIVE_M_SOAP} --average 0,0.4 --lr 0.005
--method soap --schedule constant --warmup-steps 2 --lr 0.003
{FIVE_M_SOAP} --b2 0.7 --average 0.3 --lr 0.003,0.01,0.03
--method muon --schedule constant,cosine --warmup-steps 5 --lr 0.01,0.03,0.1
{FIVE_M_MUON} --average 0.4 --lr 0.01,0.02,0.03
{FIVE_M_MUON} --average 0.4 --lr 0.03 --momentum 0.9
{FIVE_M_ADAMW} --b2 0.95,0.99 --lr 0.003,0.01
{FIVE_M_ADAMW} --b2 0.95 --lr 0.001
{FIVE_M_ADAMW} --b2 0.95 --average 0.4 --lr 0.003
""",
)

EXPERIMENTS["5m"] = Experiment(
    "How far does each method come with other seeds, at good settings of 5m-grids?",
    f"{FIVE_M_4M} --seed 1,2,3",
    f"""
{GN} --line-search 10 --schedule 'global cosine' --lr 0.02
{FIVE_M_PROX} --average 0 --lr 0.01
{LAYERWISE} --schedule 'constant+inner cosine' --lr 0.01
{FIVE_M_SOAP} --average 0.4 --lr 0.005
{FIVE_M_MUON} --average 0.4 --lr 0.02
{FIVE_M_ADAMW} --b2 0.95 --lr 0.001
""",
)

EXPERIMENTS["5m-target"] = Experiment(
    "How many steps of 4m tokens do four methods need to a loss of 3.21?",
    FIVE_M_4M,
    f"""
{GN} --schedule 'global cosine' --steps 10 --lr 0.01 --inner-epochs 1,2
{FIVE_M_PROX} --average 0 --lr 0.006 --steps 10
{FIVE_M_SOAP} --lr 0.003 --target-loss 3.21 --steps 150
{FIVE_M_MUON} --average 0.4 --lr 0.03 --target-loss 3.21 --steps 300
""",
)

FIVE_M_12M = "--model 5m --batch 12m --dtype bfloat16 --target-loss 3.21"

GN_8_STEPS = f"{GN} --schedule 'constant+inner cosine' --steps 8"
GN_6_STEPS = f"{GN} --schedule 'global cosine' --steps 6"

EXPERIMENTS["5m-12m-grids"] = Experiment(
    "With which setting does each method need the fewest steps of 12m tokens to a loss of 3.21?",
    FIVE_M_12M,
    f"""
{GN_8_STEPS} --lr 0.003,0.006,0.01
{GN_8_STEPS} --lr 0.006 --line-search 10
{GN_8_STEPS} --lr 0.006 --damping 0.00001,0.0001
{GN_8_STEPS} --lr 0.01 --damping 0.0001
{GN_8_STEPS} --lr 0.003,0.0045,0.006 --b2 0.95
{GN_8_STEPS} --lr 0.006,0.01 --b2 0.95 --damping 0.0001
{GN_8_STEPS} --lr 0.006 --b2 0.95 --damping 0.001
{GN_8_STEPS} --lr 0.003 --b2 0.9
{GN_8_STEPS} --lr 0.003,0.006,0.01 --average 0.97
{GN_8_STEPS} --lr 0.006,0.01 --inner-batch 64
{GN_8_STEPS} --lr 0.0015,0.002
{GN_8_STEPS} --lr 0.006 --momentum 0.8
{GN_8_STEPS} --lr 0.006 --restart true
{GN_8_STEPS} --lr 0.006 --inner-warmup 0.2
{GN_8_STEPS} --lr 0.002,0.003 --inner-epochs 2
{GN_6_STEPS} --lr 0.003,0.006,0.01
{GN_6_STEPS} --lr 0.006 --line-search 10
{GN_6_STEPS} --lr 0.006 --average 0.97
{FIVE_M_PROX} --average 0 --steps 6 --lr 0.003,0.006
{FIVE_M_PROX} --average 0.99 --steps 6 --lr 0.006
{FIVE_M_PROX} --average 0.99 --steps 5 --lr 0.006 --b2 0.999,0.95
{FIVE_M_PROX} --average 0.99 --steps 4 --lr 0.006,0.01
{FIVE_M_PROX} --average 0.99 --steps 4 --lr 0.003,0.006 --inner-epochs 2
{FIVE_M_PROX} --average 0.99 --steps 4 --lr 0.006 --inner-epochs 3
{LAYERWISE} --schedule 'constant+inner cosine' --steps 10 --lr 0.003,0.006,0.01
{FIVE_M_SOAP} --steps 100 --lr 0.003,0.005,0.01
{FIVE_M_MUON} --average 0.4 --steps 120 --lr 0.02,0.03,0.045
--method soap --schedule cosine --warmup-steps 5 --steps 45,50 --lr 0.005
--method muon --schedule cosine --warmup-steps 5 --steps 60,68 --lr 0.03
""",
)

# Gauss-Newton: the first line was the best of 5m-12m-grids when a part of it had been run. It fails
# at seed 2, so the second was added. The third repeats that on seeds on which nothing was chosen.
# The fourth was the best when more of the grid had been run. The fifth is the best with a mean.
EXPERIMENTS["5m-12m"] = Experiment(
    "How many steps of 12m tokens does each method need to a loss of 3.21, with other seeds?",
    FIVE_M_12M,
    f"""
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.006 --damping 0.00001 --seed 1,2,3
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.003 --seed 1,2,3
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.003 --seed 4,5,6
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.003 --b2 0.95 --seed 4,5,6
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.006 --average 0.97 --seed 1,2,3
{LAYERWISE} --schedule 'constant+inner cosine' --steps 12 --lr 0.006 --seed 1,2,3
{FIVE_M_PROX} --average 0.99 --steps 6 --lr 0.006 --seed 1,2,3
{FIVE_M_SOAP} --steps 100 --lr 0.005 --seed 1,2,3
{FIVE_M_MUON} --average 0.4 --steps 120 --lr 0.03 --seed 1,2,3
""",
)

EXPERIMENTS["5m-12m-dtypes"] = Experiment(
    "Does float32 change what Gauss-Newton and prox-linear need to a loss of 3.21?",
    "--model 5m --batch 12m --dtype float32,bfloat16 --target-loss 3.21 --seed 1",
    f"""
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.003
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.006
{FIVE_M_PROX} --average 0.99 --steps 6 --lr 0.006
""",
)

EXPERIMENTS["5m-12m-start"] = Experiment(
    "Does Gauss-Newton do better from a lower loss, after a warm-up on four times the tokens?",
    f"{FIVE_M_12M} --warmup-tokens 20m",
    f"""
{GN} --schedule 'constant+inner cosine' --steps 8 --lr 0.003,0.006
{FIVE_M_PROX} --average 0.99 --steps 6 --lr 0.006
""",
)

EXPERIMENTS["5m-12m-stand-ins"] = Experiment(
    "Which stand-in for the loss is wrong where a step of 5m-12m goes too far?",
    f"{FIVE_M_12M} --method gn --line-search-tokens 500k --schedule 'constant+inner cosine'",
    """
--steps 8 --lr 0.003,0.006,0.01
--steps 8 --lr 0.003,0.006 --warmup-tokens 20m
""",
    program=stand_ins,
)

EXPERIMENTS["5m-12m-late"] = Experiment(
    "How many steps does each method need to a loss of 3.1, after a warm-up on 20m tokens?",
    "--model 5m --batch 12m --dtype bfloat16 --warmup-tokens 20m --target-loss 3.1 --seed 1,2,3",
    f"""
{GN} --schedule 'constant+inner cosine' --steps 8 --lr 0.003
{FIVE_M_PROX} --average 0.99 --steps 6,4 --lr 0.006
{LAYERWISE} --schedule 'constant+inner cosine' --steps 10 --lr 0.006
{FIVE_M_SOAP} --steps 100 --lr 0.005
{FIVE_M_MUON} --average 0.4 --steps 120 --lr 0.03
""",
)

GN_COSINE = "--method gn --schedule 'global cosine'"

# A line search reads an eighth of a batch, and a run is evaluated 25 times, or after each step.
# The last line is the bound of Section 5.
EXPERIMENTS["5m-batches"] = Experiment(
    "What does a larger batch change at 5m, if the tokens stay as many (Section 6.1.2)?",
    "--model 5m --tokens 100m --dtype bfloat16",
    f"""
{GN_COSINE} --batch 400k --line-search-tokens 50k --eval-every 10 --lr 0.01,0.005
{GN_COSINE} --batch 1.2m --line-search-tokens 150k --eval-every 3 --lr 0.01,0.005
{GN_COSINE} --batch 4m --line-search-tokens 500k --lr 0.01,0.005
{GN_COSINE} --batch 12m --line-search-tokens 1500k --lr 0.01,0.005
{FIVE_M_PROX} --average 0.99 --batch 400k --eval-every 10 --lr 0.01,0.005
{FIVE_M_PROX} --average 0.99 --batch 1.2m --eval-every 3 --lr 0.01,0.005
{FIVE_M_PROX} --average 0.99 --batch 4m,12m --lr 0.01,0.005
{FIVE_M_SOAP} --average 0.4 --batch 400k --eval-every 10 --lr 0.005,0.0025
{FIVE_M_SOAP} --average 0.4 --batch 1.2m --eval-every 3 --lr 0.005,0.0025
{FIVE_M_SOAP} --average 0.4 --batch 4m,12m --lr 0.005,0.0025
{FIVE_M_MUON} --average 0.4 --batch 400k --eval-every 10 --lr 0.02,0.01
{FIVE_M_MUON} --average 0.4 --batch 1.2m --eval-every 3 --lr 0.02,0.01
{FIVE_M_MUON} --average 0.4 --batch 4m,12m --lr 0.02,0.01
--method muon --batch 16384 --eval-every 250 --schedule cosine --lr 0.01,0.005
""",
)

# ---- 45m, with batches of 4m to 40m tokens -------------------------------------------------------

FORTY_FIVE_M = "--model 45m --warmup-tokens 15m --target-loss 4.1 --dtype bfloat16"

FORTY_FIVE_M_PROX = "--method gn_prox --average 0.99"
FORTY_FIVE_M_SOAP = "--method soap --schedule constant --warmup-steps 5 --steps 90"
FORTY_FIVE_M_MUON = "--method muon --schedule constant --warmup-steps 5 --average 0.4 --steps 120"

# The target was a guess at what full Gauss-Newton reaches in 12 steps.
EXPERIMENTS["45m-grids"] = Experiment(
    "With which setting does each method need the fewest steps of 4m tokens to a loss of 4.1?",
    f"{FORTY_FIVE_M} --batch 4m",
    f"""
{GN} --schedule 'global cosine' --steps 12 --lr 0.006,0.01
{GN} --schedule 'global cosine' --steps 12 --lr 0.01,0.015 --line-search 10
{GN} --schedule 'global cosine' --steps 10,14 --lr 0.01
{GN} --schedule 'global cosine' --steps 12 --lr 0.01,0.015 --average 0.95,0.99
{GN} --schedule 'global cosine' --steps 12 --lr 0.01 --average 0.97
{GN} --schedule 'global cosine' --steps 10 --lr 0.01 --average 0.95
{GN} --schedule 'global cosine' --steps 12 --lr 0.01 --damping 0.00001,0.000001
{GN} --schedule 'global cosine' --steps 12 --lr 0.01 --restart true
{GN} --schedule 'constant+inner cosine' --steps 14 --lr 0.003,0.006,0.01
{GN} --schedule 'constant+inner cosine' --steps 14 --lr 0.003 --restart true
{GN} --schedule 'constant+inner cosine' --steps 14 --lr 0.006 --inner-epochs 2
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.003 --inner-epochs 2
{GN} --schedule 'global cosine' --steps 12 --lr 0.006,0.01 --inner-epochs 2
{GN} --schedule 'global cosine' --steps 12 --lr 0.006 --inner-epochs 3
{FORTY_FIVE_M_PROX} --steps 12 --lr 0.006,0.01,0.015
{FORTY_FIVE_M_PROX} --steps 9 --lr 0.01
{FORTY_FIVE_M_PROX} --steps 8 --lr 0.006,0.01 --inner-epochs 2
--method gn_prox --average 0 --steps 12 --lr 0.01
{LAYERWISE} --schedule 'global cosine' --steps 12 --lr 0.01
{LAYERWISE} --schedule 'global cosine' --steps 12 --lr 0.01,0.015 --average 0.95
{LAYERWISE} --schedule 'global cosine' --steps 14 --lr 0.015 --average 0.95
{LAYERWISE} --schedule 'constant+inner cosine' --steps 14 --lr 0.006
{FORTY_FIVE_M_SOAP} --lr 0.003,0.005,0.008
{FORTY_FIVE_M_SOAP} --lr 0.005 --average 0.4
{FORTY_FIVE_M_SOAP} --lr 0.005 --b2 0.7
--method soap --schedule constant --warmup-steps 2 --steps 90 --lr 0.005
--method soap --schedule cosine --warmup-steps 5 --steps 30 --lr 0.005,0.008
--method muon --schedule cosine --warmup-steps 5 --steps 40 --lr 0.02
{FORTY_FIVE_M_MUON} --lr 0.01,0.02,0.03
""",
)

EXPERIMENTS["45m"] = Experiment(
    "How many steps of 4m tokens does each method need to a loss of 4.1, with other seeds?",
    f"{FORTY_FIVE_M} --batch 4m --seed 1,2,3",
    f"""
{GN} --schedule 'global cosine' --steps 12 --lr 0.01 --average 0,0.95
{GN} --schedule 'global cosine' --steps 12 --lr 0.006 --inner-epochs 2
{FORTY_FIVE_M_PROX} --steps 12 --lr 0.01
{LAYERWISE} --schedule 'global cosine' --steps 14 --lr 0.015 --average 0.95
{FORTY_FIVE_M_SOAP} --lr 0.005
{FORTY_FIVE_M_MUON} --lr 0.03
""",
)

EXPERIMENTS["45m-stand-ins"] = Experiment(
    "Which stand-in for the loss is wrong where a step of 45m goes too far?",
    f"{FORTY_FIVE_M} --batch 4m {GN}",
    """
--schedule 'global cosine' --steps 12 --lr 0.01
--schedule 'constant+inner cosine' --steps 14 --lr 0.003
""",
    program=stand_ins,
)

EXPERIMENTS["45m-12m-grids"] = Experiment(
    "With which setting does each method need the fewest steps of 12m tokens to a loss of 4.1?",
    f"{FORTY_FIVE_M} --batch 12m",
    f"""
{GN} --schedule 'global cosine' --steps 9 --lr 0.01
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.003,0.006
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.006 --average 0.99
{FORTY_FIVE_M_PROX} --steps 6 --lr 0.006,0.01
{FORTY_FIVE_M_PROX} --steps 4 --lr 0.006 --inner-epochs 2
{FORTY_FIVE_M_SOAP} --lr 0.005
{FORTY_FIVE_M_MUON} --lr 0.03
""",
)

EXPERIMENTS["45m-12m"] = Experiment(
    "How many steps of 12m tokens does each method need to a loss of 4.1, with other seeds?",
    f"{FORTY_FIVE_M} --batch 12m",
    f"""
{GN} --schedule 'constant+inner cosine' --steps 10 --lr 0.006 --average 0.99 --seed 1,2,3
{FORTY_FIVE_M_PROX} --steps 6 --lr 0.006 --seed 1,2,3
{FORTY_FIVE_M_SOAP} --lr 0.005 --seed 1,2,3
{FORTY_FIVE_M_MUON} --lr 0.03 --seed 1
""",
)

# The text has 184m tokens: SOAP and Muon read it several times.
EXPERIMENTS["45m-40m"] = Experiment(
    "How many steps of 40m tokens, the paper's batch of Muon, does each method need to 4.1?",
    f"{FORTY_FIVE_M} --batch 40m",
    f"""
{GN} --schedule 'constant+inner cosine' --steps 8 --line-search 10 --lr 0.002,0.004
{GN} --schedule 'global cosine' --steps 6 --line-search 10 --lr 0.002 --average 0.99 --seed 0,1,2
{FORTY_FIVE_M_PROX} --steps 3 --lr 0.003
{FORTY_FIVE_M_PROX} --steps 4 --lr 0.003,0.006
{FORTY_FIVE_M_PROX} --steps 4 --lr 0.003 --seed 1
{FORTY_FIVE_M_SOAP} --lr 0.005 --seed 0,1
{FORTY_FIVE_M_MUON} --lr 0.03
""",
)


# Flags that do not count where a saved run is compared with a command. `check_text` compares texts.
NOT_COMPARED = (*recipe.MAY_DIFFER, "data")


# ---- what there is to do -------------------------------------------------------------------------


class Job(NamedTuple):
    """A run of an experiment, which can be trained."""

    words: list  # the command line of train.py
    run: Any  # the recipe.Run that they describe
    program: Any  # the module whose main trains it


def results_of(name):
    """The file of an experiment."""
    return Path(f"results/{name}.jsonl")


def jobs_of(name, text=None):
    """The Jobs of an experiment, in the order in which they are trained.

    text: the path that the runs read, if another than their commands name. Raises ValueError if a
    command is not valid.
    """
    experiment = EXPERIMENTS[name]
    jobs = {}
    for line in experiment.commands.strip().splitlines():
        words = shlex.split(f"{experiment.common} {line}")
        if text:
            words += ["--data", text]
        for words_of_run in flags.expand(words):
            run = recipe.configure(words_of_run, home=f"runs/{name}")
            folder = run.config.out
            # A run that two commands describe is one Job.
            words_of_run = [*words_of_run, "--out", folder]
            jobs[folder, run.last_step] = Job(words_of_run, run, experiment.program)
    # Lengths of one run, which have one folder, follow one another, the shortest first.
    ordered = recipe.in_order([job.run for job in jobs.values()])
    return [jobs[run.config.out, run.last_step] for run in ordered]


def find_missing(jobs, saved_runs):
    """The Jobs whose runs are not among some packed runs, or have not come to an end there."""
    ended = [saved for saved in saved_runs if has_ended(saved)]
    missing = []
    for job in jobs:
        if not any(is_same(saved, job.run) for saved in ended):
            missing.append(job)
    return missing


def is_same(saved, run):
    """Whether a packed run was made with the flags of a Run that count."""
    flags_then = recipe.defaults_of(run) | saved["config"]
    names = run.values.keys() - {*NOT_COMPARED}
    return all(flags_then.get(name) == run.values[name] for name in names)


def has_ended(saved):
    """Whether a packed run is at its end, has come to its target, or has diverged."""
    if not saved["rows"]:
        return False
    last = saved["rows"][-1]
    if "diverged" in last or last["step"] == saved["config"].get("steps"):
        return True
    target = saved["config"].get("target_loss")
    return target is not None and last["val_loss"] <= target


# ---- doing it ------------------------------------------------------------------------------------


def train_missing(name, jobs, minutes):
    """Trains the Jobs of an experiment, but for those that another command trains.

    Returns the exit status: 0 if all that it has trained have ended, or when the minutes are over;
    else that of the run that did not end. Raises Stop if a signal came.
    """
    file = results_of(name)
    with Signals(), stopping_after(minutes) as is_over:
        if jobs:  # all read one text
            run = jobs[0].run
            check_text(file, find_held_out(run), run.config.out)
        for number, job in enumerate(jobs, 1):
            with claimed(name, job) as is_mine:
                if is_mine:
                    title = f"run {number} of {len(jobs)} that are missing: {job.run.config.out}"
                    print(f"\n==== {name}: {title}")
                    status = train_one(file, job)
                    if is_over.is_set():
                        break
                    if status:
                        return status

    left = len(find_missing(jobs, packed.read(file)))
    if left:
        print(f"missing runs: {left}; if no other command trains them, give this one again")
    else:
        print(f"{file} has all runs")
    return 0


@contextmanager
def claimed(name, job):
    """Yields whether this command may train a Job. While it may, no other command does.

    It may not if another one now trains it, or another length of it in the same folder, or has
    added it to the file of the experiment since.
    """
    lock = Path(f"runs/{name}/locks") / Path(job.run.config.out).name
    with ExitStack() as stack:
        is_free = files.hold(lock, stack)
        yield is_free and bool(find_missing([job], packed.read(results_of(name))))


def train_one(file, job):
    """Trains a Job, and adds it to a file if it has ended.

    Returns the exit status: 0 if it has ended, also if it has diverged.
    """
    folder = job.run.config.out
    train.forget_programs()
    status = job.program.main(job.words)
    may_have_ended = status in (0, 1)  # a run that diverges has status 1, as some others have
    if not may_have_ended:
        return status
    saved = cut(packed.pack(folder), job.run)
    if not has_ended(saved):
        return 1
    # Another command, on another text, may have added the first runs of the file meanwhile.
    check_text(file, comparison.held_out_of(saved["config"]), folder)
    packed.add(file, [saved])
    return 0


def cut(saved, run):
    """A packed run up to the length of a Run: its folder may hold the same run with more steps."""
    if not saved["rows"] or saved["rows"][-1]["step"] <= run.last_step:
        return saved
    rows = [row for row in saved["rows"] if row["step"] <= run.last_step]
    length = {name: run.values[name] for name in ("steps", "tokens")}
    return saved | {"config": saved["config"] | length, "rows": rows}


@contextmanager
def stopping_after(minutes):
    """Within it, SIGTERM comes after some minutes. train.py then saves its run and stops.

    Yields an Event that is set by then.
    """
    is_over = threading.Event()

    def stop():
        is_over.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(60 * minutes, stop)
    timer.daemon = True  # it does not keep the process alive
    if minutes:  # 0 = never
        timer.start()
    try:
        yield is_over
    except Stop:  # it came between two runs
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()


def find_held_out(run):
    """The hash of the text that the evaluations of a Run would read.

    The text is tokenized as far as the warm-up reads. Raises BadInput if it is missing or damaged.
    """
    need = run.warmup_batches * run.inner_tokens
    with blaming_input():
        corpus = data.prepare(run.config.data, run.tokenizer, run.network.context, need)
    return corpus.meta["sha256"]["val"]


def check_text(file, held_out, folder):
    """Raises BadInput if the run of a folder reads another held-out text than those of a file."""
    for other in packed.read(file):
        if comparison.held_out_of(other["config"]) != held_out:
            remedy = "give the --data of those, or move the file away"
            raise BadInput(f"{folder} reads another text than the runs in {file}: {remedy}")


def pack(file, folders):
    """Adds the runs of some folders to a file, but for those that it has."""
    if Path(file).suffix != ".jsonl":
        raise ValueError(f"--pack {file}: the name must end in .jsonl")
    packed.read(file)  # raises ValueError before anything is made if it is another file
    found = []
    for source, unpack in comparison.find_runs(folders):
        try:
            saved = unpack()
        except files.UNREADABLE as error:
            say(f"{source} cannot be read: {comparison.describe(error)}")
            continue
        if saved["rows"]:
            found.append(saved)
        else:
            say(f"{source} has no row yet")
    if not found:
        raise ValueError(f"there is no run to add to {file}")
    added = packed.add(file, found)
    print(f"{file}: {added} runs were added, {len(found) - added} were there already")


def list_experiments():
    """Lists the experiments, with what they ask and how many of their runs are there."""
    not_counted = {}  # {why: names of experiments}
    for name, experiment in EXPERIMENTS.items():
        try:
            jobs = jobs_of(name)
            done = len(jobs) - len(find_missing(jobs, packed.read(results_of(name))))
            count = f"{done} of {len(jobs)} runs"
        except ValueError as error:  # such as a vocabulary that is not on this machine
            not_counted.setdefault(str(error), []).append(name)
            count = "runs not counted"
        print(f"{name}: {count}. {experiment.question}")
    for why, names in not_counted.items():
        say(f"not counted: {', '.join(names)}: {why}")


# ---- the command line ----------------------------------------------------------------------------


def parse(words):
    """The command line. Raises ValueError for what is not valid."""
    usage = "experiments.py [NAME [--data PATH] [--minutes M] | --pack FILE RUN ...]"
    form = argparse.RawDescriptionHelpFormatter
    parser = flags.Parser(usage=usage, description=__doc__, formatter_class=form)
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--data", help="the text, where an experiment reads one of your own")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many; 0 = never")
    parser.add_argument("--pack", nargs="+", metavar=("FILE", "RUN"), help="add runs to a file")
    options = parser.parse_args(words)
    if options.name is not None:  # here, as argparse would blame it for a flag that is misspelt
        flags.check_choice(options, "name", EXPERIMENTS)
    flags.check_range(options, ["minutes"], least=0, most=1e6)
    if options.pack and (options.name or len(options.pack) == 1):
        raise ValueError("--pack takes a file and the folders of runs, and no experiment")
    if not options.name and (options.data or options.minutes):
        raise ValueError("--data and --minutes need the name of an experiment")
    return options


@command
def main(words):
    """Runs the command line."""
    with blaming_input():
        options = parse(words)
        if options.pack:
            file, *folders = options.pack
            pack(file, folders)
            return 0
        parallel.start()  # before train.py asks JAX for devices
        if jax.process_count() > 1:
            raise ValueError("experiments.py trains in one process; for several, start train.py")
        if not options.name:
            list_experiments()
            return 0
        name = options.name
        files.check_writable("results")
        jobs = jobs_of(name, options.data)
        if options.data:
            check_text(results_of(name), find_held_out(jobs[0].run), options.data)
        jobs = find_missing(jobs, packed.read(results_of(name)))
    return train_missing(name, jobs, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
