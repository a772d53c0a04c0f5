"""A line about a fault names the client by its own name, the sample or column, and the round."""

import pytest

from datamodules import ConfigError
from tests.faults.planted import FAULTS, NAMES

# No client can be named: the id itself is missing, the row has too many cells, the sample is of
# the official test set or of clients that are only drawn, or the number of a client is wrong.
WITHOUT_A_CLIENT = {
    "a client that is missing",
    "a cohort with an unknown client",
    "a row with a cell too many",
    "an id that is missing",
    "an id that is no number",
    "an item that cannot be read",
    "an unknown client that fails",
    "an unknown newcomer",
    "inputs with nan where clients are drawn",
    "test inputs with nan",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_names_client_sample_and_round(fault, tmp_path):
    plant, words = FAULTS[fault]
    with pytest.raises(Exception) as caught:
        plant(tmp_path)
    line = str(caught.value)
    if isinstance(caught.value, ConfigError):
        assert "\n" not in line
    else:  # of code of the user, with its traceback
        line += " ".join(getattr(caught.value, "__notes__", []))
    assert not [word for word in words if word not in line], line


def test_how_many_faults_name_the_client():
    naming = {
        name
        for name, (_, words) in FAULTS.items()
        if any(client in word for word in words for client in NAMES)
    }
    assert FAULTS.keys() - naming == WITHOUT_A_CLIENT
    assert len(naming) >= 50
