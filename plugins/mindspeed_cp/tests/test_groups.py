"""The groups of context parallelism: few for each rank, listed in seconds for a large machine."""

import time

import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator

from mindspeed_core.runtime.process_groups import Groups, created_apart, sub_groups
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.modules.members import group_parts
from mindspeed_cp.options import CPOptions
from mindspeed_testing import run_world

HYBRID = CPOptions(Grid(4, 4, window=2), send_receive_overlap=True)


def test_the_groups_of_16384_ranks_are_listed_in_seconds():
    begin = time.perf_counter()
    ranks = RankGenerator(tp=8, ep=1, dp=16, pp=8, cp=16, order="tp-cp-ep-dp-pp")
    whole = ranks.get_ranks("cp")
    assert (len(whole), sum(map(len, whole))) == (1024, 16384)
    mine, total, memberships = {}, 0, [0] * 16384
    for name, parts in group_parts(HYBRID).items():
        lists = sub_groups(whole, parts)
        assert sorted(rank for group in lists for rank in group) == list(range(16384))
        assert created_apart(lists, memberships)
        memberships = [count + 1 for count in memberships]
        mine[name] = sum(5000 in group for group in lists)
        total += len(lists)
    seconds = time.perf_counter() - begin
    print(f"{total} groups of 16384 ranks in {seconds:.2f} s, {sum(mine.values())} of them a rank's own")
    assert mine == {"cp.inner": 1, "cp.outer": 1, "cp.across": 1, "cp.second": 1}
    assert seconds < 30


def test_members_alone_need_the_same_number_of_groups_behind_them():
    assert created_apart([[0, 1], [2, 3]], [1, 1, 4, 4])
    assert not created_apart([[0, 1], [2, 3]], [1, 2, 4, 4])
    assert not created_apart([[0, 1], [1, 2]], [0, 0, 0])
    assert not created_apart([[0, 1]], [0, None])


def four_ranks():
    dist.init_process_group("gloo")
    rank, called = dist.get_rank(), []
    original = dist.new_group

    def counted(ranks, **options):
        called.append((ranks, options["use_local_synchronization"]))
        return original(ranks, **options)

    dist.new_group = counted
    groups = Groups()
    groups.split("rows", dist.group.WORLD, [[0, 1], [2, 3]])
    groups.split("columns", dist.group.WORLD, [[0, 2], [1, 3]])
    groups.split("again", dist.group.WORLD, [[0, 1], [2, 3]])
    apart = list(called)
    original([0])  # rank 0 is in one more group now
    groups.split("uneven", dist.group.WORLD, [[0, 1], [2, 3]])
    dist.new_group = original
    found = []
    for name in groups:
        gathered = [None] * 2
        dist.all_gather_object(gathered, rank, group=groups[name])
        found.append(gathered)
    dist.barrier()
    dist.destroy_process_group()
    return apart, found, len(called) - len(apart)


def test_a_rank_creates_the_groups_it_is_in_where_all_members_can():
    for rank, (apart, found, together) in enumerate(run_world(four_ranks, 4)):
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert apart == [(row, True), (column, True), (row, True)]
        assert found == [row, column, row, row]
        assert together == 2
