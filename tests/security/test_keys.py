"""Key files: private, whole, told in one line what is wrong with them, and read again when they change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.errors import UsageError
from mdi.net.keys import KeyFile, key_of, mac, new_secret, parse_keys, text_of, write_keys

A, B = bytes(32), bytes(range(32))


def test_a_key_file_is_its_owners_alone_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.key"
    write_keys(path, (A, B))
    assert KeyFile(path).keys == (A, B)
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.key"]
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        with pytest.raises(UsageError, match="chmod 600"):
            KeyFile(path)


def test_comments_and_repeated_keys_do_not_count() -> None:
    assert parse_keys(f"# ours\n\n{text_of((A, B, A))}", "f") == (A, B)


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "mdi-key-1\n", "mdi-key-1 c2hvcnQ=\n", "mdi-key-2 " + text_of((A,)).split()[1], "a b c\n",
     text_of(tuple(bytes([i]) * 32 for i in range(9))), "mdi-key-1 " + "é" * 44],
)  # fmt: skip
def test_what_is_no_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys(text, "f")
    words = text.split()
    assert len(str(caught.value).splitlines()) == 1 and not (len(words) == 2 and words[1] in str(caught.value))


def test_a_changed_file_is_read_again_and_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    keys = key_file(path, A)
    write_keys(path, (A, B))
    assert keys.keys == (A, B)
    write_keys(path, (B, A))
    assert keys.first == B
    path.write_text("nonsense, and longer than before " * 9)
    assert keys.keys == (B, A)
    path.unlink()
    assert keys.keys == (B, A)
    write_keys(path, (B,))
    assert keys.keys == (B,)


def test_a_file_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mdi key"):
        KeyFile(tmp_path / "none")


def test_codes_tell_keys_labels_and_the_cut_between_parts_apart() -> None:
    codes = {
        mac(A, "one", b"ab", b"c"),
        mac(A, "one", b"a", b"bc"),
        mac(A, "two", b"ab", b"c"),
        mac(B, "one", b"ab", b"c"),
    }
    assert len(codes) == 4
    found = mac(B, "one", b"ab")
    assert key_of(found, (A, B), "one", b"ab") == B
    assert key_of(found, (A, new_secret()), "one", b"ab") is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root changes files of others")
def test_a_key_that_root_changes_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "k"
    write_keys(path, (A,))
    os.chown(path, 65534, 65533)
    write_keys(path, (A, B))
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65533, 0o600)
