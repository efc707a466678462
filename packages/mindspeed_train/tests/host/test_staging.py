"""The copy of a rank's state for its writer: what lies in the shared memory, and when that is got anew."""

import pytest
import torch

from mindspeed_train.checkpoint.background import BackgroundProcess
from mindspeed_train.checkpoint.staging import Staging


class Counted(BackgroundProcess):
    def __init__(self):
        super().__init__("no:work", limit=1.0)
        self.memories = []

    def share(self, size):
        self.memories.append(super().share(size))
        return self.memories[-1]


@pytest.fixture
def process():
    with_memory = Counted()
    yield with_memory
    with_memory.close()


def read(process, places, dtype):
    memory = process.memories[-1]
    return [torch.frombuffer(memory[begin : begin + length], dtype=dtype) for begin, length in places]


def test_the_bytes_lie_where_it_says_also_of_transposed_tensors(process):
    tensors = [torch.randn(4, 6).t(), torch.randn(3)]

    places = Staging(process).copy(tensors)

    for found, tensor in zip(read(process, places, torch.float32), tensors):
        assert torch.equal(found, tensor.reshape(-1))


def test_memory_is_kept_when_only_shapes_differ(process):
    staging, tensor = Staging(process), torch.randn(4, 6)
    before = [*staging.copy([torch.zeros(4, 6)])]

    places = staging.copy([tensor[None]])

    assert (places, len(process.memories)) == (before, 1)
    assert torch.equal(read(process, places, torch.float32)[0], tensor.reshape(-1))


@pytest.mark.parametrize("other", [torch.zeros(5, 6), torch.zeros(4, 6, dtype=torch.float64)])
def test_memory_is_got_anew_for_other_sizes_and_types(process, other):
    staging = Staging(process)
    staging.copy([torch.zeros(4, 6)])

    staging.copy([other])

    assert len(process.memories) == 2
