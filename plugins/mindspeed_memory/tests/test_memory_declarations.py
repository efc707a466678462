"""The declarations: sound, documented, free of heavy imports."""

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_memory.features import DECLARATIONS
from mindspeed_testing.declared import declaration_faults

FEATURES = declared_features(DECLARATIONS)


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_memory.features") == []


def test_nothing_of_megatron_core_is_patched():
    assert [feature.name for feature in FEATURES if feature.patches] == []
