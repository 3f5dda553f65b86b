"""What the Triton backend reads of PyTorch's settings."""

import pytest

from tests.support import TF32_SWITCHES, tf32_switched

pytestmark = pytest.mark.triton
config = pytest.importorskip("rnnt.triton.config")


@pytest.mark.parametrize(("name", "on", "off"), TF32_SWITCHES)
def test_tf32_by_either_name(name, on, off):
    """The older name raises when it is read once the newer one has been set."""
    for value, allowed in ((on, True), (off, False), (on, True)):
        with tf32_switched(name, value):
            assert config.tf32_allowed() is allowed
