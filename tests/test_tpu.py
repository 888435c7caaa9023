"""On a TPU everything is plain JAX in bfloat16: each compiled function is lowered for one, here.

Lowering turns a function into the program that XLA's compiler for the TPU gets. No TPU is needed
for it, and none was at hand to run these programs.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import TOY, random_params, random_tokens
from jax import export

import baselines
import gn
import gn_cg
import line_search
import model
import recipe
import sample
import train
from runtime import parallel

NETWORK = replace(TOY, n_layers=1, dtype="bfloat16")
PARAMS = model.shapes(NETWORK)
TOKENS = random_tokens(NETWORK, 4)
# Linear algebra of SOAP, which XLA has on a TPU too.
LINEAR_ALGEBRA = {"Eigh", "Qr", "ProductOfElementaryHouseholderReflectors"}


def lowered(f, *args):
    """The text of the program for a TPU; args: arrays or their shapes, and settings."""
    program = export.export(f, platforms=["tpu"])(*args).mlir_module()
    called = set(re.findall(r"custom_call @([\w$.]+)", program))
    assert called <= LINEAR_ALGEBRA, called
    return program


def products(program):
    """The types of the first factors of all matrix products of a program."""
    return re.findall(r"stablehlo\.dot_general.* : \(tensor<(?:\d+x)*(\w+)>", program)


@pytest.mark.parametrize("name", recipe.METHODS)
def test_every_program_of_a_method_can_be_lowered_for_a_tpu(name):
    """Its gradient's products are in bfloat16; attention's scores are float32's."""
    module, config_class, _ = recipe.METHODS[name]
    config = config_class(NETWORK, 2, 3)
    init = jax.jit(partial(module.init, config=config))
    state = jax.eval_shape(init, PARAMS)
    lowered(init, PARAMS)
    if module is baselines:
        gradient = lowered(baselines.accumulate, state, TOKENS, config)
        lowered(baselines.finish, state, config)
    elif module is gn_cg:
        measured = PARAMS, PARAMS, TOKENS, config, gn.quadratic, gn.value_and_grad
        gradient = lowered(gn_cg.measure, *measured)
        lowered(gn_cg.measure, *measured[:4], gn_cg.curvature, gn.value_and_grad)
        lowered(gn_cg.conjugate_step, PARAMS, PARAMS, PARAMS, PARAMS)
    else:
        objective = jax.jit(config.value_and_grad)
        of_objective = lowered(objective, PARAMS, PARAMS, TOKENS)
        gradient = lowered(gn.inner_step, state, TOKENS, config)
        lowered(gn.move, state, jnp.ones(()), config)
        # Muon's products are in bfloat16, too.
        assert products(gradient).count("bf16") > products(of_objective).count("bf16")
    assert products(gradient).count("bf16") > 10
    assert set(products(gradient)) == {"bf16", "f32"}


def test_what_methods_share_can_be_lowered_for_a_tpu():
    """The line search, the evaluation, and the draw of sample.py."""
    config = gn.Config(NETWORK, 2, 3)
    search = lowered(line_search.loss_at, PARAMS, PARAMS, jnp.ones(()), TOKENS, config)
    loss = lowered(train.mean_loss, NETWORK, PARAMS, TOKENS)
    window = TOKENS[:1, :-1]
    draw = lowered(sample.draw, NETWORK, PARAMS, window, 3, jax.random.key(0))
    for program in (search, loss, draw):
        assert "bf16" in products(program)


def test_a_step_that_four_devices_share_can_be_lowered_for_a_tpu():
    config = gn.Config(NETWORK, 2, 3)
    with jax.set_mesh(parallel.mesh(4, shard=True)):
        state = gn.init(random_params(NETWORK), config)
        step = lowered(gn.inner_step, state, TOKENS, config)
    assert "all_gather" in step and "reduce_scatter" in step
