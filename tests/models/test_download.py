"""Models by their names on the hub: which files are chosen, fetched and checked, with a stand-in of the hub."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf_files
import huggingface_hub
import numpy as np
import pytest
from stand_in_hub import StandInHub, described

from ssd.assembly.open import open_checkpoint
from ssd.errors import ConfigError, ModelNotFound, SSDError, UnsupportedModel
from ssd.models.download import _write, download, plan
from ssd.models.hub import HubName, local_model, short_name
from ssd.models.repository import checkpoint_names, matching, quantization, tag

NAMES = ("tiny-Q8_0.gguf", "tiny-q4_k_m.gguf", "tiny.Q4_K_S.gguf", "tiny-f16.gguf", "mmproj-tiny-f16.gguf")


def gguf_file(folder: Path, name: str = "tiny.gguf", **changes: Any) -> bytes:
    arrays, kinds = gguf_files.stored_model()
    return gguf_files.write(folder / name, "llama", {**gguf_files.VALUES, **changes}, arrays, kinds).read_bytes()


def pulled(name: str, revision: str | None = None) -> Path:
    wanted = HubName.of(name)
    assert wanted is not None
    return download(plan(wanted, revision), lambda size: None)


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "hub").glob("models--*/blobs/*"))


# --- which files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, ["tiny-q4_k_m.gguf"]),
        ("Q8_0", ["tiny-Q8_0.gguf"]),
        ("q4_k_s", ["tiny.Q4_K_S.gguf"]),
        ("F16", ["tiny-f16.gguf"]),
        ("Q4_K", []),
        ("*q4*", ["tiny-q4_k_m.gguf", "tiny.Q4_K_S.gguf"]),
        ("*q4*.gguf", ["tiny-q4_k_m.gguf", "tiny.Q4_K_S.gguf"]),
        ("tiny-q8_0.gguf", ["tiny-Q8_0.gguf"]),
    ],
)
def test_a_gguf_file_is_chosen_by_quantisation_or_pattern(wanted: str | None, found: list[str]) -> None:
    assert matching(NAMES, wanted) == found


def test_every_gguf_file_has_a_tag_that_means_it_alone() -> None:
    names = [
        *NAMES[:4],
        "other-Q8_0.gguf",
        "deep/tiny-IQ2_XS-00001-of-00002.gguf",
        "deep/tiny-IQ2_XS-00002-of-00002.gguf",
    ]
    tags = [tag(name, names) for name in names[:6]]
    assert tags == ["tiny-Q8_0.gguf", "Q4_K_M", "Q4_K_S", "F16", "other-Q8_0.gguf", "IQ2_XS"]
    assert [matching(names, each) for each in tags] == [[name] for name in names[:6]]
    assert [quantization(name) for name in ("x-BF16.gguf", "x-fp32.gguf", "x-32.gguf", "x.gguf", "Q8_0.gguf")] == [
        *("BF16", "FP32", "", ""),
        "Q8_0",
    ]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("org/tiny", True), ("org/tiny:Q4_K_M", True), ("org/tiny:*Q4*.gguf", True), ("tiny", False), ("a/b/c", False)],
)
def test_what_is_a_name_on_the_hub(name: str, is_one: bool) -> None:
    found = HubName.of(name)
    assert (found is not None) == is_one
    assert found is None or str(found) == name


def test_only_needed_files_of_a_checkpoint(tmp_path: Path) -> None:
    names = ["config.json", "tokenizer.json", "merges.txt", "model.safetensors", "model.fp32.safetensors", "README.md"]
    names += ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "consolidated.safetensors"]
    names += ["original/params.json", "onnx/model.onnx", "chat_template.jinja", "flax_model.msgpack"]
    needed = ["model.safetensors", "chat_template.jinja", "config.json", "merges.txt", "tokenizer.json"]
    assert checkpoint_names("org/tiny", names, None) == needed
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.fp32.safetensors"}}))
    assert checkpoint_names("org/tiny", names, index)[0] == "model.fp32.safetensors"
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    with pytest.raises(ModelNotFound, match=r"org/tiny lacks weight files .* other\.safetensors"):
        checkpoint_names("org/tiny", names, index)
    with pytest.raises(UnsupportedModel, match="pickled weights only"):
        checkpoint_names("org/tiny", ["config.json", "pytorch_model.bin"], None)


# --- downloads --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_pulled_with_needed_files_only(hub: StandInHub, llama: Path) -> None:
    extra = {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice", "README.md": b"", "a/b.json": b"{}"}
    files = {file.name: file.read_bytes() for file in llama.iterdir()}
    hub.add("org/tiny", {**files, **extra})
    path = pulled("org/tiny")
    assert {file.name for file in path.iterdir()} == files.keys()
    assert hub.fetched() == sorted(files)
    assert all((path / name).read_bytes() == content for name, content in files.items())
    assert open_checkpoint("org/tiny").path == path == local_model(HubName("org/tiny"))
    assert (path.parents[1] / "refs" / "main").read_text() == "c" * 40
    assert (short_name(path), short_name(llama)) == ("org/tiny", llama.name)


def test_what_is_opened_by_name_is_downloaded_once(hub: StandInHub, llama: Path) -> None:
    hub.add("org/tiny", llama)
    path = open_checkpoint("org/tiny").path
    asked = len(hub.asked)
    assert open_checkpoint("org/tiny").path == path
    assert len(hub.asked) == asked


def test_a_gguf_file_is_pulled_and_opened_by_its_tag(hub: StandInHub, tmp_path: Path) -> None:
    content = gguf_file(tmp_path)
    others = dict.fromkeys(("tiny-Q8_0.gguf", "README.md", "tiny-Q2_K.gguf"), b"other")
    hub.add("org/tiny", {"tiny-Q4_K_M.gguf": content, **others})
    path = open_checkpoint("org/tiny").path
    assert path.read_bytes() == content
    assert hub.fetched() == ["tiny-Q4_K_M.gguf"]
    assert open_checkpoint("org/tiny:q4_k_m").path == open_checkpoint("org/tiny:*Q4*.gguf").path == path
    assert open_checkpoint("graft:org/tiny:Q4_K_M@llama-3.2-1b").path == path
    assert hub.fetched() == ["tiny-Q4_K_M.gguf"]
    assert pulled("org/tiny:Q8_0").name == "tiny-Q8_0.gguf"
    assert local_model(HubName("org/tiny")) == path


def test_the_config_of_a_gguf_repository_makes_it_no_checkpoint(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", {"tiny-Q4_K_M.gguf": gguf_file(tmp_path), "config.json": b"{}"})
    path = pulled("org/tiny")
    (path.parent / "config.json").write_text("{}")  # as other tools download it
    assert open_checkpoint("org/tiny").path == path


def test_an_unclear_or_unknown_file_lists_the_choices_with_sizes(hub: StandInHub) -> None:
    hub.add("org/tiny", {"tiny-Q8_0.gguf": b"x" * 2_300_000, "tiny-Q2_K.gguf": b"x" * 500_000, "README.md": b""})
    with pytest.raises(ModelNotFound, match=r"(?s)no GGUF file for the usual Q4_K_M.*0\.5 MB  tiny-Q2_K.*2\.3 MB"):
        pulled("org/tiny")
    with pytest.raises(ModelNotFound, match="no GGUF file for 'Q5_K'"):
        pulled("org/tiny:Q5_K")
    with pytest.raises(ConfigError, match=r"(?s)2 GGUF files for '\*'.*such as org/tiny:Q2_K"):
        pulled("org/tiny:*")
    hub.add("org/none", {"config.json": b"{}", "model.safetensors": b"x"})
    with pytest.raises(ModelNotFound, match="has no GGUF file"):
        pulled("org/none:Q8_0")
    assert not hub.fetched()


def test_a_model_in_several_gguf_files_is_refused_by_name(hub: StandInHub) -> None:
    hub.add("org/tiny", {f"tiny-Q4_K_M-0000{i}-of-00002.gguf": b"x" for i in (1, 2)})
    with pytest.raises(UnsupportedModel, match=r"tiny-Q4_K_M-00001-of-00002\.gguf is in 2 parts"):
        pulled("org/tiny")
    assert not hub.fetched()


def test_an_interrupted_download_goes_on_where_it_stopped(hub: StandInHub, llama: Path, tmp_path: Path) -> None:
    """Catches one that begins again, and a partial file that counts as whole."""
    weights = max((file for file in llama.glob("*.safetensors")), key=lambda file: file.stat().st_size)
    hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": weights.read_bytes()})
    hub.cut, hub.piece = 4096, 1024
    with pytest.raises(SSDError, match=r"status 503: try again later; what was downloaded is kept"):
        pulled("org/tiny")
    assert 4096 in [file.stat().st_size for file in blobs(tmp_path) if file.suffix == ".incomplete"]
    assert local_model(HubName("org/tiny")) is None
    hub.cut = None
    hub.failing.clear()
    planned, counted = plan(HubName("org/tiny")), []
    present = planned.present
    assert 4096 <= present <= 4098
    path = download(planned, counted.append)
    assert "bytes=4096-" in hub.ranges()
    assert sum(counted) == planned.size - present
    assert (path / "model.safetensors").read_bytes() == weights.read_bytes()
    assert not [file for file in blobs(tmp_path) if file.suffix == ".incomplete"]


@pytest.mark.parametrize("left", [b"con", b"content, and more than that", b"wrong"])
def test_what_an_earlier_run_has_left_cannot_spoil_a_file(left: bytes, hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", {"tiny.gguf": b"content"})
    blobs_folder = tmp_path / "home" / "hub" / "models--org--tiny" / "blobs"
    blobs_folder.mkdir(parents=True)
    (blobs_folder / f"{hashlib.sha256(b'content').hexdigest()}.incomplete").write_bytes(left)
    if left == b"wrong":
        with pytest.raises(SSDError, match="is not what the hub describes"):
            pulled("org/tiny")
    assert pulled("org/tiny").read_bytes() == b"content"


def test_a_server_that_sends_files_from_the_beginning_only(hub: StandInHub, tmp_path: Path) -> None:
    """Catches bytes that are counted or written twice."""
    hub.add("org/tiny", {"tiny.gguf": b"content"})
    hub.cut = 3
    with pytest.raises(SSDError):
        pulled("org/tiny")
    hub.cut, hub.ranges_count = None, False
    hub.failing.clear()
    planned, counted = plan(HubName("org/tiny")), []
    assert planned.present == 3
    assert download(planned, counted.append).read_bytes() == b"content"
    assert sum(counted) == 4


def test_the_hubs_own_library_finds_what_was_downloaded(hub: StandInHub, llama: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", llama)
    path, cache = pulled("org/tiny"), tmp_path / "home" / "hub"
    found = huggingface_hub.hf_hub_download("org/tiny", "config.json", cache_dir=cache, local_files_only=True)
    assert Path(found) == path / "config.json"
    report = huggingface_hub.scan_cache_dir(cache)
    assert not report.warnings
    [repository] = report.repos
    assert (repository.repo_id, repository.refs.keys()) == ("org/tiny", {"main"})
    asked = len(hub.asked)
    for offline in (True, False):
        assert huggingface_hub.snapshot_download("org/tiny", cache_dir=cache, local_files_only=offline) == str(path)
    assert not [each for each in hub.asked[asked:] if each.file]


def test_two_downloads_at_the_same_time_share_the_files(hub: StandInHub, llama: Path) -> None:
    """As the ranks of a model do, or engines of one process. Catches two writers of one file."""
    hub.add("org/tiny", llama)
    hub.delay, hub.piece = 0.005, 1 << 14
    with ThreadPoolExecutor(3) as pool:
        [path] = set(pool.map(pulled, ["org/tiny"] * 3))
    assert all((path / file.name).read_bytes() == file.read_bytes() for file in llama.iterdir())
    asked = [each.file for each in hub.asked if each.file]
    assert sorted(asked) == hub.fetched()


def test_every_writer_of_a_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Catches names that two threads share: the second finds that the first has moved their file."""
    path = tmp_path / "refs" / "main"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _write(path, str(number) * 40), range(400)))
    assert len(path.read_text()) >= 40
    assert [each.name for each in path.parent.iterdir()] == ["main"]


def test_a_file_that_becomes_complete_meanwhile_is_present(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file of 100 GB that is taken for missing, because its name changes between two looks."""
    hub.add("org/tiny", {"tiny.gguf": b"content"})
    planned = plan(HubName("org/tiny"))
    [file], snapshot, look = planned.files, planned.snapshot, Path.stat
    partial, blob = snapshot.partial(file), snapshot.blob(file)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"content")

    def stat(path: Path, **options: Any) -> Any:
        if path == partial:
            partial.replace(blob)
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert planned.present == planned.size


def test_a_download_that_fails_does_not_wait_for_that_of_another_process(hub: StandInHub) -> None:
    """Catches Ctrl-C, too, that has to wait until the other one has finished."""
    hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"weights"})
    planned = plan(HubName("org/tiny"))
    large = next(file for file in planned.files if file.name == "model.safetensors")
    locks = planned.snapshot.entry.parent / ".locks" / planned.snapshot.entry.name
    locks.mkdir(parents=True)
    hub.failing.add(f"/org/tiny/resolve/{'c' * 40}/config.json")
    with ThreadPoolExecutor(1) as pool:
        with huggingface_hub.utils.WeakFileLock(locks / f"{large.hash}.lock"):
            failed = pool.submit(download, planned, lambda size: None)
            assert isinstance(failed.exception(30), SSDError)
        assert "503" in str(failed.exception())
    assert hub.fetched() == ["config.json"]


def test_content_that_is_not_what_the_hub_describes_is_refused(hub: StandInHub, tmp_path: Path) -> None:
    hub.add(
        "org/tiny",
        {"tiny.gguf": b"content"},
        changes={"tiny.gguf": {"lfs": {**described("x.gguf", b"c0ntent")["lfs"]}}},
    )
    with pytest.raises(SSDError, match=r"tiny\.gguf is not what the hub describes"):
        pulled("org/tiny")
    assert not blobs(tmp_path)
    hub.add(
        "org/json", {"model.safetensors": b"w", "config.json": b"{1}"}, changes={"config.json": {"blobId": "0" * 40}}
    )
    with pytest.raises(SSDError, match=r"config\.json is not what the hub describes"):
        pulled("org/json")
    assert local_model(HubName("org/json")) is None


@pytest.mark.parametrize(
    ("size", "error"), [(3, "sends more of tiny.gguf than its 3 bytes"), (9, "sends 7 bytes of tiny.gguf only")]
)
def test_a_wrong_size_is_refused(size: int, error: str, hub: StandInHub, tmp_path: Path) -> None:
    lfs = {**described("x.gguf", b"content")["lfs"], "size": size}
    hub.add("org/tiny", {"tiny.gguf": b"content"}, changes={"tiny.gguf": {"lfs": lfs}})
    with pytest.raises(SSDError, match=error):
        pulled("org/tiny")
    assert local_model(HubName("org/tiny")) is None


@pytest.mark.parametrize("name", ["../../../escaped.gguf", "/escaped.gguf", "a/../../../../escaped.gguf"])
def test_file_names_cannot_leave_the_cache(name: str, hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", {name: b"content"})
    with pytest.raises(SSDError):
        pulled("org/tiny")
    assert not [file for file in tmp_path.rglob("escaped.gguf") if "snapshots" not in file.parts]
    assert local_model(HubName("org/tiny")) is None


@pytest.mark.parametrize("commit", ["../../..", "", "c" * 39])
def test_a_commit_that_is_none_is_refused(commit: str, hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", {"tiny.gguf": b"content"}, changes={"": {"sha": commit}})
    with pytest.raises(SSDError, match="the hub answered with the commit"):
        pulled("org/tiny")
    assert not (tmp_path / "home" / "hub").exists()


def test_a_hash_that_is_a_path_is_no_name_of_a_blob(hub: StandInHub, tmp_path: Path) -> None:
    lfs = {**described("x.gguf", b"content")["lfs"], "sha256": "../../escaped"}
    hub.add("org/tiny", {"tiny.gguf": b"content"}, changes={"tiny.gguf": {"lfs": lfs}})
    with pytest.raises(SSDError):
        pulled("org/tiny")
    assert not list(tmp_path.rglob("escaped*"))


# --- errors that say what to do ---------------------------------------------------------------------------------------


def test_gated_private_and_unknown_models(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"tiny.gguf": b"content"}
    hub.add("org/gated", files, gated=True, token="hf_right")
    hub.add("org/private", files, token="hf_right")
    with pytest.raises(ModelNotFound, match=rf"accept its licence at {hub.address}/org/gated, then set HF_TOKEN"):
        pulled("org/gated")
    for name in ("org/private", "org/unknown"):
        with pytest.raises(ModelNotFound, match=rf"there is no {hub.address}/{name}, or it is private"):
            pulled(name)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelNotFound, match="accept its licence"):
        pulled("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pulled("org/gated").read_bytes() == pulled("org/private").read_bytes() == b"content"
    assert {each.headers.get("authorization") for each in hub.asked[-3:]} == {"Bearer hf_right"}


def test_a_token_is_not_sent_to_another_host(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", {"tiny.gguf": b"content"})
    hub.elsewhere = True
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pulled("org/tiny").read_bytes() == b"content"
    sent = [(each.headers["host"].split(":")[0], each.headers.get("authorization")) for each in hub.asked]
    assert sent[-2:] == [("127.0.0.1", "Bearer hf_right"), ("localhost", None)]


def test_revisions(hub: StandInHub) -> None:
    hub.add("org/tiny", {"tiny.gguf": b"content"})
    with pytest.raises(ModelNotFound, match="has no such revision"):
        pulled("org/tiny", "v2")
    path = pulled("org/tiny", "c" * 40)
    assert local_model(HubName("org/tiny"), "c" * 40) == path
    assert local_model(HubName("org/tiny"), "main") is None


def test_offline(hub: StandInHub, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", llama)
    path = pulled("org/tiny")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert open_checkpoint("org/tiny").path == path
    with pytest.raises(ModelNotFound, match=r"(?s)none of these places.*HF_HUB_OFFLINE is set.*`ssd pull org/other`"):
        open_checkpoint("org/other")


def test_no_network(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match=r"http://127\.0\.0\.1:9 could not be reached.*HF_ENDPOINT"):
        pulled("org/tiny")


def test_a_full_disk_is_known_before(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", {"tiny.gguf": b"x" * 5000})
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4000))
    with pytest.raises(SSDError, match=r"org/tiny needs 0\.0 MB more in .*, where 0\.0 MB are free"):
        pulled("org/tiny")
    assert not hub.fetched()


def test_random_bytes_of_any_size_arrive_as_they_are(hub: StandInHub) -> None:
    source = np.random.default_rng(0)
    for size in (0, 1, 100_003):
        content = source.bytes(size)
        hub.add(f"org/n{size}", {"tiny.gguf": content})
        assert pulled(f"org/n{size}").read_bytes() == content
