"""The iteration brings singular values near one, also over tensor-parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from mindspeed_core import ParameterPart
from mindspeed_optim.muon.matrices import Matrix
from mindspeed_optim.muon.newton_schulz import newton_schulz, scale_factor
from mindspeed_optim.muon.options import SETS, MuonOptions, coefficients
from mindspeed_optim.muon.tensor_parallel import orthogonalized
from mindspeed_testing import run_world


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
@pytest.mark.parametrize(
    ("kind", "steps", "least", "most"),
    [
        ("quintic", 5, 0.9, 1.1),
        ("simple", 5, 0.65, 1.2),
        ("polar_express", 8, 0.98, 1.02),
        ("aol", 4, 0.7, 1.2),
    ],
)
def test_singular_values_come_near_one(shape, kind, steps, least, most):
    found = torch.linalg.svdvals(newton_schulz(gaussian(*shape), coefficients(kind, steps)))
    assert least < float(found.min())
    assert float(found.max()) < most


def test_the_directions_stay():
    matrix = gaussian(32, 64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(
        newton_schulz(matrix, coefficients("polar_express", 12)), left @ right, atol=1e-2, rtol=0
    )


def test_zeros_stay_zeros():
    assert not newton_schulz(torch.zeros(4, 8), SETS["quintic"]).any()


def test_steps_of_polar_express_beyond_the_last_repeat_it():
    assert coefficients("polar_express", 10)[-3:] == (SETS["polar_express"][-1],) * 3
    assert coefficients("simple", 3) == SETS["simple"] * 3


@pytest.mark.parametrize(
    ("mode", "factor"), [("spectral", 8.0), ("unit_rms_norm", 2.0), ("shape_scaling", 2.0)]
)
def test_the_scale_is_of_output_and_input(mode, factor):
    assert scale_factor(64, 16, mode) == factor


def test_a_wide_matrix_is_scaled_by_its_shape_at_least_by_one():
    assert scale_factor(16, 64, "shape_scaling") == 1.0
    assert scale_factor(16, 64, "unit_rms_norm") == 0.5


def shared(mode):
    """Largest distance of each cut and shape from the whole."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found = {}
    for shape in ((64, 256), (256, 64), (48, 48)):
        whole = gaussian(*shape)
        expected = orthogonalized(whole, matrix(shape, None, None), MuonOptions(precision="high"))
        for cut in (0, 1):
            own = whole.chunk(2, cut)[rank]
            options = MuonOptions(precision="high", tp_mode=mode)
            made = orthogonalized(own, matrix(own.shape, cut, group), options)
            found[shape, cut] = float(
                (made - expected.chunk(2, cut)[rank]).abs().max() / expected.abs().max()
            )
    return found


def matrix(shape, cut, group):
    part = ParameterPart(None, "", 0, shape[0] * shape[1], torch.Size(shape), cut, group)
    return Matrix(part, cut, lambda whole: [whole], lambda pieces: pieces[0])


def all_modes():
    dist.init_process_group("gloo")
    found = {mode: shared(mode) for mode in ("duplicated", "distributed", "blockwise")}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def distances():
    return run_world(f"{__name__}:all_modes", 2, timeout=100)


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_ranks_that_share_a_matrix_make_what_one_makes(distances, mode):
    for rank in distances:
        assert max(rank[mode].values()) < 1e-5


def test_each_part_by_itself_is_another_update(distances):
    assert min(distances[0]["blockwise"].values()) > 0.05
