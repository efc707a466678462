"""What authors import from the package itself."""

import subprocess
import sys

import mindspeed_core
from mindspeed_core import _PUBLIC


def test_every_public_name_can_be_imported():
    assert sorted(mindspeed_core.__all__) == sorted(_PUBLIC)
    for name in mindspeed_core.__all__:
        assert getattr(mindspeed_core, name) is not None, name


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, mindspeed_core; assert not {'torch', 'megatron.core', 'pluggy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
