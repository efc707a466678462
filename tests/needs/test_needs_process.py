"""Needs at the start of a run: the environment, process groups, configuration and seeds."""

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from toy_training import TP2, opened, step, training

from mindspeed_core.activation import activate
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.group_options import NAMES
from mindspeed_testing import run_world


class EnvironmentProbe:
    @hookimpl(wrapper=True)
    def init_distributed(self):
        self.seen = os.environ.get("MINDSPEED_TOY")
        return (yield)


def environment():
    os.environ.pop("MINDSPEED_TOY", None)
    probe = EnvironmentProbe()
    with training("--toy-environment", "calm", probes=(probe,)) as run:
        step(run)
        during = os.environ.get("MINDSPEED_TOY")
    absent = os.environ.get("MINDSPEED_TOY")
    os.environ["MINDSPEED_TOY"] = "before"
    with opened("--toy-environment", "calm"):
        pass
    return probe.seen, during, absent, os.environ["MINDSPEED_TOY"]


def test_environment_is_set_before_the_process_group_and_restored_at_close():
    (result,) = run_world(environment, 1)
    assert result == ("calm", "calm", None, "before")


def groups():
    with training("--toy-groups") as run:
        session, rank = run.session, dist.get_rank()
        world = dist.get_world_size()
        # A token goes once around the ring: each rank sends on its own directed pair.
        sending = session.groups.all("toy.forward")
        ranks = session.groups.ranks("toy.forward")
        mine = [pair for pair in ranks if rank in pair]
        forward = sending[mine.index(ranks[rank])]
        backward = sending[mine.index(ranks[(rank - 1) % world])]
        token = torch.tensor([float(rank)])
        received = torch.empty(1)
        send = dist.isend(token, (rank + 1) % world, group=forward)
        dist.recv(received, (rank - 1) % world, group=backward)
        send.wait()
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups["toy.halves"])
        loss = step(run).losses["lm loss"]
        names = list(session.groups)
    kept = dist.get_process_group_ranks(forward)
    with training("--toy-groups") as run:
        again = run.session.groups.all("toy.forward")
        same = all(new is old for new, old in zip(again, sending, strict=True))
    return names, received.item(), total.item(), len(mine), loss > 0, (kept, same), list(session.groups)


def test_groups_are_found_by_name_carry_messages_and_wait_for_the_next_session():
    results = run_world(groups, 4)
    for rank, (names, received, total, pairs, trained, (kept, same), left) in enumerate(results):
        assert names == ["toy.forward", "toy.backward", "toy.halves"]
        assert received == (rank - 1) % 4
        assert total == 2.0
        assert pairs == 2
        assert trained
        # The world is still there, and a group that is made again in it would not find its peers.
        assert rank in kept
        assert same
        assert left == []


def init_depth():
    def deviations(run):
        layer = run.model[0].module.decoder.layers[0]
        proj, qkv = layer.self_attention.linear_proj.weight, layer.self_attention.linear_qkv.weight
        return float(proj.std()), float(qkv.std())

    with training() as run:
        plain = deviations(run)
    with training("--toy-init-depth", "400") as run:
        deep = deviations(run)
        run.session.call("seed_everything", args=run.args, pg=run.pg)
        seeded = torch.get_rng_state()
        layers = run.config.num_layers, len(run.model[0].module.decoder.layers)
        loss = step(run).losses["lm loss"]
    probe = GeneratorProbe()
    with training("--toy-init-depth", "400", probes=(probe,)):
        pass
    return plain, deep, layers, loss, torch.equal(seeded, probe.state)


class GeneratorProbe:
    @hookimpl(wrapper=True)
    def build_ddp_config(self):
        self.state = torch.get_rng_state()
        return (yield)


def test_configuration_is_built_with_other_values_and_generators_are_seeded_again():
    results = run_world(init_depth, 1)
    (plain_proj, plain_qkv), (deep_proj, deep_qkv), layers, loss, seeded = results[0]
    assert deep_proj == pytest.approx(plain_proj / 10, rel=0.05)
    assert deep_qkv == pytest.approx(plain_qkv, rel=0.05)
    assert layers == (4, 4)
    assert loss > 0
    assert seeded


@contextmanager
def asked_options():
    """What every group that is created here is asked for, by its options' mark."""
    found, new_group = [], dist.new_group

    def watched(*args, pg_options=None, **named):
        found.append(pg_options.group if pg_options is not None else None)
        return new_group(*args, pg_options=pg_options, **named)

    with mock.patch.object(dist, "new_group", watched):
        yield found


def group_marks():
    with asked_options() as found, training("--toy-group-marks", "--toy-groups", *TP2) as run:
        loss = step(run).losses["lm loss"]
    with activate(["--toy-group-marks", *TP2], platform="cpu", host="library"):
        with asked_options() as in_own_loop:
            parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    dist.barrier()
    destroy_megatron_state()
    with asked_options() as afterwards:
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    return found, loss > 0, in_own_loop, set(afterwards)


def test_groups_of_features_and_of_megatron_core_get_options_by_their_names():
    for found, trained, in_own_loop, afterwards in run_world(group_marks, 2):
        assert trained
        assert {"toy.forward", "toy.halves"} <= set(found)
        for names in (found, in_own_loop):
            assert {"dp", "dp_cp", "cp", "mp", "tp", "pp", "ep", "ep_dp"} <= set(names) - {None}
            # The rest are gloo's own groups beside them.
            assert {name for name in names if name} <= {*NAMES, "toy.forward", "toy.backward", "toy.halves"}
        assert None not in in_own_loop
        assert afterwards == {None}


def test_a_group_of_tensor_parallel_training_is_named_too():
    results = run_world(tensor_parallel_groups, 2)
    assert [result[0] for result in results] == [[[0], [1]]] * 2
    assert all(result[1] for result in results)


def tensor_parallel_groups():
    with training("--toy-groups", *TP2) as run:
        return run.session.groups.ranks("toy.halves"), step(run).losses["lm loss"] > 0
