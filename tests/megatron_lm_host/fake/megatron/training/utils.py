"""Facts about the device."""

import torch


def get_device_arch_version():
    return torch.cuda.get_device_properties(torch.device("cuda:0")).major
