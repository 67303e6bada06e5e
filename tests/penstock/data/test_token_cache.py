"""Are tokens kept as they were made, and made anew where they were not?"""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import token_cache as room
from penstock.data.chat import Encoded
from penstock.data.data import read_data
from penstock.data.files.sources import DataSource
from penstock.data.map_style import MapStyleData
from penstock.data.token_cache import TokenCache, cached_tokens
from penstock.settings import DataSettings
from runtime.errors import DataError
from tests.chats import LLAMA3, write_talker
from tests.tour import ROOT

runs = st.lists(st.integers(0, 30), max_size=6, unique=True).map(sorted).map(lambda edges: edges[: len(edges) // 2 * 2])
encoded = st.builds(
    lambda ids, edges: Encoded(np.array(ids, dtype=np.int64), np.array(edges, dtype=np.int64).reshape(-1, 2)),
    st.lists(st.integers(0, 2**16 - 1), max_size=40),
    runs,
)


def keep(cache: Path, documents: list[Encoded], key: str = "key", wide: bool = False) -> TokenCache:
    source = DataSource(Path("data.jsonl"), (Path("data.jsonl"),))
    rows = ((0, n, document) for n, document in enumerate(documents, start=1))
    return cached_tokens(cache, key, source, wide, lambda left_out: rows)


@pytest.mark.drawn
@given(documents=st.lists(encoded, max_size=12), wide=st.booleans(), few_at_once=st.booleans())
def test_what_is_kept_is_what_was_made(tmp_path_factory, documents, wide, few_at_once):
    size, room.BATCH_TOKENS = room.BATCH_TOKENS, 30 if few_at_once else room.BATCH_TOKENS
    try:
        kept = keep(tmp_path_factory.mktemp("cache"), documents, wide=wide)
    finally:
        room.BATCH_TOKENS = size
    assert kept.lengths.tolist() == [len(document.ids) for document in documents]
    for d, document in enumerate(documents):
        assert kept.ids(d).tolist() == document.ids.tolist()
        assert kept.ids(d).dtype == (np.uint32 if wide else np.uint16)
        assert kept.runs(d).tolist() == document.runs.tolist()
        assert kept.where(d) == f"data.jsonl:{d + 1}"
        learned = {t for a, b in document.runs for t in range(a, b)}
        assert kept.n_learned[d] == len(learned)
        assert kept.n_targets[d] == len(learned - {0})


def data_of(folder: Path, cache: Path, **fields: object) -> MapStyleData:
    data = read_data(DataSettings(str(folder), **fields), None, 300, 8, 2, 0, cache)
    assert isinstance(data, MapStyleData)
    return data


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(30)))
    return tmp_path / "data"


@pytest.fixture
def made(monkeypatch):
    """How often tokens were made."""
    calls = []
    make = room._make
    monkeypatch.setattr(room, "_make", lambda *args: calls.append(args) or make(*args))
    return calls


def test_tokens_are_made_once_for_all_settings_that_share_them(folder, tmp_path, made):
    fingerprints = {data_of(folder, tmp_path / "cache", packing=packing).fingerprint for packing in ("joined", "one")}
    fingerprints.add(data_of(folder, tmp_path / "cache", shuffle=False).fingerprint)
    assert len(fingerprints) == 3
    assert len(made) == 1


def test_moved_data_has_the_same_tokens_and_changed_data_has_others(folder, tmp_path, made):
    before = data_of(folder, tmp_path / "cache")
    moved = folder.rename(tmp_path / "elsewhere")
    assert data_of(moved, tmp_path / "cache").fingerprint == before.fingerprint
    assert len(made) == 1
    stat = (moved / "a.jsonl").stat()
    content = (moved / "a.jsonl").read_bytes()
    (moved / "a.jsonl").write_bytes(content.replace(b"text 17", b"Text 17"))
    os.utime(moved / "a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert data_of(moved, tmp_path / "cache").fingerprint != before.fingerprint
    (moved / "a.jsonl").write_bytes(content[:-20])
    assert data_of(moved, tmp_path / "cache").fingerprint != before.fingerprint
    assert len(made) == 3
    assert before.batch(0).n_supervised, "what a run has open stays"


@pytest.mark.soak
def test_another_tokenizer_or_template_makes_other_tokens(tmp_path, made):
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )

    def fingerprint(template: str, **config: object) -> str:
        size = write_talker(tmp_path / "model", "llama 3", template, **config)
        data = read_data(DataSettings(str(tmp_path / "chat.jsonl")), tmp_path / "model", size, 64, 1, 0, tmp_path / "cache")
        return data.fingerprint

    first = fingerprint(LLAMA3)
    assert fingerprint(LLAMA3) == first
    assert len(made) == 1
    assert len({first, fingerprint(LLAMA3.replace("\n\n", "\n")), fingerprint(LLAMA3, bos_token="<|eot_id|>")}) == 3
    assert len(made) == 3


def spoil_arrow(cache: Path) -> None:
    file = cache / "tokens.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def misdescribe(cache: Path, **said: object) -> None:
    file = cache / "about.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))


DAMAGE = {
    "a bit": spoil_arrow,
    "half a file": lambda cache: os.truncate(cache / "tokens.arrow", (cache / "tokens.arrow").stat().st_size // 2),
    "no tokens": lambda cache: (cache / "tokens.arrow").unlink(),
    "no description": lambda cache: (cache / "about.json").unlink(),
    "an empty description": lambda cache: (cache / "about.json").write_text("{}"),
    "a description that is none": lambda cache: (cache / "about.json").write_text("[" * 10**5),
    "a description of other tokens": lambda cache: misdescribe(cache, tokens_sha256="0" * 64),
    "a description of files that nobody left out": lambda cache: misdescribe(cache, n_left_out=7),
    "an empty folder": lambda cache: (shutil.rmtree(cache), cache.mkdir()),
    "a file": lambda cache: (shutil.rmtree(cache), cache.write_text("x")),
    "a link": lambda cache: (shutil.move(cache, cache.with_name("other")), cache.symlink_to("other"), spoil_arrow(cache)),
    "a half-written one beside it": lambda cache: shutil.move(cache, cache.with_name(cache.name + ".partial")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_anew(folder, tmp_path, damage):
    cache = tmp_path / "cache"
    before = data_of(folder, cache)
    expected = before.fingerprint, before.batch(3).input_ids.tolist()
    DAMAGE[damage](next(cache.glob("tokens-*")))
    after = data_of(folder, cache)
    assert (after.fingerprint, after.batch(3).input_ids.tolist()) == expected
    assert not list(cache.glob("*.partial"))


def test_a_run_that_is_killed_while_it_makes_tokens_leaves_nothing_that_is_believed(folder, tmp_path):
    cache = tmp_path / "cache"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom penstock.data import token_cache\n"
        "from penstock.data.data import read_data\n"
        "from penstock.settings import DataSettings\n"
        "token_cache.sync = lambda path: path.name == 'about.json' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "read_data(DataSettings(sys.argv[1]), None, 300, 8, 2, 0, Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, cache], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert [path.suffix for path in cache.glob("tokens-*")] == [".partial"]
    assert data_of(folder, cache).batch(0).n_supervised
    assert not list(cache.glob("*.partial"))


def test_runs_that_begin_together_make_tokens_once(folder, tmp_path, made):
    found = []
    threads = [threading.Thread(target=lambda: found.append(data_of(folder, tmp_path / "cache").fingerprint)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(made) == 1


def test_a_row_that_is_refused_leaves_no_cache(folder, tmp_path):
    with (folder / "a.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(DataError, match=r"a\.jsonl:31"):
        data_of(folder, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), pyarrow.ArrowInvalid("no space")])
def test_a_full_disk_is_one_line(folder, tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(room.ArrowWriter, "write_table", full)
    with pytest.raises(DataError, match=r"cache: tokens cannot be kept there \([Nn]o space") as caught:
        data_of(folder, tmp_path / "cache")
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_a_folder_is_one_line(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(DataError, match="tokens cannot be kept there"):
            data_of(folder, cache)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(DataError, match="tokens cannot be kept there"):
        data_of(folder, tmp_path / "odd")
    assert not (tmp_path / "target").exists()


def test_tokens_stay_in_the_file_until_they_are_asked_for(tmp_path):
    """A map, not a copy: neither Arrow nor this process holds them."""
    big = np.arange(2**21) % 2**16
    document = Encoded(big, np.array([[0, len(big)]]))
    keep(tmp_path, [document] * 16)  # 64 MiB
    code = (
        "import sys, pyarrow\nfrom pathlib import Path\n"
        "from penstock.data.files.sources import DataSource\nfrom penstock.data.token_cache import cached_tokens\n"
        "def held(): return 4096 * int(open('/proc/self/statm').read().split()[1]), pyarrow.total_allocated_bytes()\n"
        "before = held()\n"
        "kept = cached_tokens(Path(sys.argv[1]), 'key', DataSource(Path('x'), (Path('x'),)), False, None)\n"
        "after = held()\n"
        "assert len(kept.lengths) == 16 and int(kept.ids(7)[5]) == 5\n"
        "print(after[0] - before[0], after[1] - before[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
    resident, allocated = map(int, done.stdout.split())
    assert resident < 24 * 2**20
    assert allocated < 2**20
