"""Models by name, over https: one in the place of another, none when nobody asks; and the end of a server that is writing."""

from __future__ import annotations

import datetime
import ipaddress
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from conftest import Server
from mdi.cli import launch
from mdi.cli.serve_settings import serve_settings
from mdi.errors import UsageError
from mdi.serve.process import listening_socket
from mdi.spec.options import Options
from tiny_checkpoint import reference, write_checkpoint
from waiting import until


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself: certificate and key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = builder.add_extension(addresses, critical=False).sign(key, hashes.SHA256())
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no_password))
    return paths


def complete(server: Server, model: str, prompt: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}
    status, told = server.ask("POST", "/v1/completions", body)
    assert status == 200, told
    return told["choices"][0]


@pytest.mark.slow
def test_models_come_and_go_by_name_and_the_end_lets_texts_be_finished(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "org" / "tiny")
    (tmp_path / "models" / "org" / "empty").mkdir()
    certificate, key = make_certificate(tmp_path)
    server = Server(
        tmp_path, "--ckpt-folder", tmp_path / "models", "--tls-cert", certificate, "--tls-key", key, "--keep-alive", 2,
        certificate=certificate,
    )  # fmt: skip
    try:
        server.wait()
        listed = server.ask("GET", "/v1/models")[1]["data"]
        assert [entry["id"] for entry in listed] == ["nano-llama", "org/tiny"]
        first = complete(server, "nano-llama", "ROMEO:")["text"]
        codec_ids = reference("The ring", 6)
        tiny = complete(server, "org/tiny", "The ring", logprobs=0)
        assert len(tiny["logprobs"]["tokens"]) == len(codec_ids) and tiny["text"] == text_of(tmp_path, codec_ids)
        assert complete(server, "nano-llama", "ROMEO:")["text"] == first
        assert server.ask("POST", "/v1/completions", {"model": "org/empty", "prompt": "x"})[0] == 404
        until(lambda: server.ask("GET", "/health")[1]["status"] == "idle")
        assert complete(server, "", "ROMEO:")["text"] == first, "it is loaded again"
        finish_while_ending(server)
    finally:
        status = server.end()
    assert status == 0, server.log.read_text()


def text_of(tmp_path: Path, ids: tuple[int, ...]) -> str:
    from mdi.text.texts import TextCodec

    return TextCodec.from_checkpoint(tmp_path / "models" / "org" / "tiny", "none").decode(ids, continues=True)


def finish_while_ending(server: Server) -> None:
    """A stream goes on while the server ends, and nobody new is let in."""
    connection = server.connection()
    body = {"model": "", "prompt": "ROMEO:", "max_tokens": 200, "stream": True, "logit_bias": {"0": -100}}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    read = [answer.readline()]
    ending = threading.Thread(target=server.end)
    ending.start()
    read += answer.readlines()
    connection.close()
    ending.join(30)
    assert read[-2] == b"data: [DONE]\n" and sum(line.startswith(b"data: {") for line in read) > 5
    with pytest.raises(OSError):
        server.ask("GET", "/v1/models")


def test_what_is_wrong_with_the_flags_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nano = str(Path(__file__).resolve().parents[2] / "assets" / "nano-llama")
    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "empty").chmod(0o600)
    for flags in (
        ["--host", "0.0.0.0"], ["--tls-cert", nano], ["--port", "70000"], ["--nodes", "2", "--nodes-config", "x"],
        ["--queue", "-1"], ["--api-key", "short"], ["--api-key-file", str(tmp_path / "empty")], ["--keep-alive", "0"],
    ):  # fmt: skip
        assert launch("serve", ["--ckpt", nano, *flags]) == 2, flags
        assert "error: " in capsys.readouterr().err
    with pytest.raises(UsageError):
        listening_socket("192.0.2.1", 80)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_of_api_keys_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "keys").write_text("long-enough alpha\n")
    args = Options(api_key_file=tmp_path / "keys")
    (tmp_path / "keys").chmod(0o600)
    assert [key.name for key in serve_settings(args).keys] == ["alpha"]
    (tmp_path / "keys").chmod(mode)
    with pytest.raises(UsageError) as e:
        serve_settings(args)
    assert f"chmod 600 {tmp_path / 'keys'}" in str(e.value)


def test_models_are_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "org" / "tiny")
    folder = ["--ckpt-folder", str(tmp_path)]
    assert launch("list", folder) == 0 and "org/tiny" in capsys.readouterr().out
    assert launch("rm", ["org/tiny", *folder]) == 2, "nobody is there to be asked"
    assert launch("rm", ["../other", "--yes", *folder]) == 2
    assert launch("rm", ["org/tiny", "--yes", *folder]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [".mdi"], "the store's own folder, of locks"
    assert launch("list", folder) == 0 and "org/tiny" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("custom/base", "custom/base/finetuned"),  # a model in a model
        ("org/tiny", "../disk/tiny"),  # behind a link
        ("link", "../disk/tiny"),
    ],
)
def test_what_is_more_than_the_named_model_is_not_removed(
    tmp_path: Path, name: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    for folder in (home, home / "custom" / "base", home / "custom" / "base" / "finetuned", tmp_path / "disk" / "tiny"):
        write_checkpoint(folder)
    write_checkpoint(home / "keep" / "precious")
    (home / "org").symlink_to(tmp_path / "disk", target_is_directory=True)
    (home / "link").symlink_to(tmp_path / "disk" / "tiny", target_is_directory=True)
    before = sorted(tmp_path.rglob("*"))
    assert launch("list", ["--ckpt-folder", str(home)]) == 0 and f"{name} " in capsys.readouterr().out
    assert launch("rm", [name, "--yes", "--ckpt-folder", str(home)]) == 2
    assert sorted(tmp_path.rglob("*")) == before and (home / kept).is_dir()


def test_a_model_in_a_folder_that_is_reached_by_a_link_is_removed(tmp_path: Path) -> None:
    """The link to the folder of the models is the user's own choice; and the models inside a model can go first."""
    for folder in ("base", "base/finetuned"):
        write_checkpoint(tmp_path / "disk" / folder)
    (tmp_path / "home").symlink_to(tmp_path / "disk", target_is_directory=True)
    for name in ("base/finetuned", "base"):
        assert launch("rm", [name, "--yes", "--ckpt-folder", str(tmp_path / "home")]) == 0
        assert not (tmp_path / "disk" / name).exists()


def test_the_folder_of_all_models_is_not_removed_as_a_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert launch("rm", [".", "--yes", "--ckpt-folder", str(tmp_path)]) == 2
    assert sorted(tmp_path.rglob("*")) == before
