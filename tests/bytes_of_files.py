"""What does a test see of a file's rows, read as bytes?"""

from pathlib import Path

import pytest

from penstock.data.data import read_data
from penstock.data.map_style import MapStyleData
from penstock.settings import DataSettings
from runtime.errors import DataError


def read(path: Path, **fields: object) -> MapStyleData:
    data = read_data(DataSettings(str(path), **fields), None, 300, 64, 1, 0, path.parent / "cache")
    assert isinstance(data, MapStyleData)
    return data


def refused(path: Path, **fields: object) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **fields)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 480, "no part is cut where it is shown"
    return str(caught.value)
