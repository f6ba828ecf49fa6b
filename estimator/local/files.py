"""A CreateTrainingJob request as files: the `/opt/ml` tree of each host, before and after the job.

The tree lies in a folder of this machine, so `/opt/ml` in the user's own texts (hyperparameters,
environment) is replaced by it. Data on this machine is linked, not copied, as a container would
mount it; data in S3 is downloaded.
"""

from __future__ import annotations

import filecmp
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .checkpoints import bring_checkpoints, keep_checkpoints
from .paths import translate_paths
from .store import Store

__all__ = ["collect_outputs", "host_names", "model_address", "prepare_tree"]


def host_names(request: Mapping[str, Any]) -> list[str]:
    """`algo-1`, `algo-2`, ..., as SageMaker names them."""
    return [f"algo-{number + 1}" for number in range(request["ResourceConfig"]["InstanceCount"])]


def prepare_tree(request: Mapping[str, Any], host: str, root: Path, store: Store) -> None:
    """Write the input side of a host's tree at `root`.

    Raises:
        ValueError: a channel asks for what does not exist or is not supported here; names it.
    """
    hosts = host_names(request)
    instance_type = request["ResourceConfig"]["InstanceType"]
    config = root / "input" / "config"
    config.mkdir(parents=True)
    for directory in ("code", "model", "output/data"):
        (root / directory).mkdir(parents=True)
    group = {"instance_group_name": "homogeneousCluster", "instance_type": instance_type, "hosts": hosts}
    resources = {
        "current_host": host,
        "current_instance_type": instance_type,
        "current_group_name": "homogeneousCluster",
        "hosts": hosts,
        "instance_groups": [group],
        "network_interface_name": "lo",
    }
    channels = {channel["ChannelName"]: channel for channel in request.get("InputDataConfig", ())}
    descriptions = {name: _describe(request, channel) for name, channel in channels.items()}
    _write(config / "resourceconfig.json", resources)
    _write(config / "hyperparameters.json", _hyperparameters(request, root, store))
    _write(config / "inputdataconfig.json", descriptions)
    for name, channel in channels.items():
        try:
            _check_input_mode(descriptions[name]["TrainingInputMode"])
            _bring_channel(channel, root / "input" / "data" / name, store, hosts.index(host), len(hosts))
        except ValueError as error:
            raise ValueError(f"channel {name!r}: {error}") from error
    bring_checkpoints(request, root, store)


def model_address(request: Mapping[str, Any], store: Store) -> str:
    """Where model.tar.gz will be: as file:// where that is on this machine.

    Raises:
        ValueError: the request names no such place.
    """
    address = f"{_output_prefix(request)}/model.tar.gz"
    try:
        local = store.local_path(address)
    except ValueError as error:
        raise ValueError(f"output_path: {error}") from None
    return address if local is None else f"file://{local}"


def collect_outputs(
    request: Mapping[str, Any], trees: Sequence[Path], target: Path, store: Store, say: Callable[[str], None]
) -> None:
    """Pack what the hosts left and bring it to where the request wants it.

    Args:
        trees: of all hosts.
        target: a folder for the archives.
        say: takes a line for the job's log.

    Raises:
        ValueError: it could not be brought there; the archives stay in `target`.
    """
    try:
        _bring_archives(request, trees, target, store, say)
    finally:
        for tree in trees:
            keep_checkpoints(request, tree, store)


def _bring_archives(
    request: Mapping[str, Any], trees: Sequence[Path], target: Path, store: Store, say: Callable[[str], None]
) -> None:
    target.mkdir(exist_ok=True)
    archives = [target / "model.tar.gz"]
    _pack(archives[0], [tree / "model" for tree in trees], say)
    if any(_has_entries(tree / "output" / "data") for tree in trees):
        archives.append(target / "output.tar.gz")
        _pack(archives[1], [tree / "output" / "data" for tree in trees], say)
    for archive in archives:
        address = f"{_output_prefix(request)}/{archive.name}"
        if store.local_path(address) != archive.absolute():
            store.upload(archive, address)


def _output_prefix(request: Mapping[str, Any]) -> str:
    return f"{request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}/output"


def _has_entries(directory: Path) -> bool:
    """Whether anything is in it; a script may have removed it."""
    return directory.is_dir() and any(directory.iterdir())


def _hyperparameters(request: Mapping[str, Any], root: Path, store: Store) -> dict[str, str]:
    written = {}
    for name, text in request.get("HyperParameters", {}).items():
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name == "sagemaker_submit_directory" and isinstance(value, str) and value.startswith("s3://"):
            translated = _source_on_this_machine(value, root, store)
        else:
            translated = translate_paths(value, root)
        written[name] = text if translated == value and value is not text else json.dumps(translated)
    return written


def _source_on_this_machine(uri: str, root: Path, store: Store) -> str:
    """The address of the archive here. It is fetched now, for the session's credentials and endpoint are
    not those of the host's process."""
    path = store.local_path(uri)
    if path is None:
        path = root / "input" / "sourcedir.tar.gz"
        try:
            store.download_file(uri, path)
        except ValueError as error:
            raise ValueError(f"source code: {error}") from error
    return f"file://{path}"


def _describe(request: Mapping[str, Any], channel: Mapping[str, Any]) -> dict[str, str]:
    """A channel's entry of inputdataconfig.json."""
    source = next(iter(channel["DataSource"].values()))
    entry = {
        "TrainingInputMode": channel.get("InputMode", request["AlgorithmSpecification"]["TrainingInputMode"]),
        "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
        "RecordWrapperType": channel.get("RecordWrapperType", "None"),
    }
    return entry | ({"ContentType": channel["ContentType"]} if "ContentType" in channel else {})


def _check_input_mode(mode: str) -> None:
    """`mode`: the channel's own, or else the job's."""
    if mode == "Pipe":
        raise ValueError("input mode 'Pipe' is not supported in local mode: use 'File'")


def _bring_channel(
    channel: Mapping[str, Any], directory: Path, store: Store, host_index: int, num_hosts: int
) -> None:
    ((kind, source),) = channel["DataSource"].items()
    if kind not in ("S3DataSource", "FileDataSource"):
        raise ValueError(f"a {kind} is not supported in local mode: give a file:// or s3:// address")
    if channel.get("CompressionType", "None") != "None":
        raise ValueError(
            f"compression {channel['CompressionType']!r} is not supported in local mode: unpack the data"
        )
    if source.get("S3DataType", "S3Prefix") != "S3Prefix":
        raise ValueError(
            f"s3_data_type {source['S3DataType']!r} is not supported in local mode: use 'S3Prefix'"
        )
    uri = source.get("FileUri") or source["S3Uri"]
    path = store.local_path(uri)
    sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
    directory.parent.mkdir(parents=True, exist_ok=True)
    if path is None:
        keys = store.keys(uri)
        if not keys:
            raise ValueError(f"no object of S3 starts with {uri}")
        store.download(uri, keys[host_index::num_hosts] if sharded else keys, directory)
        directory.mkdir(exist_ok=True)
    elif path.is_dir():
        if not sharded:
            directory.symlink_to(path, target_is_directory=True)
            return
        files = sorted(file for file in path.rglob("*") if file.is_file())
        directory.mkdir()  # also where there are fewer files than hosts
        for file in files[host_index::num_hosts]:
            target = directory / file.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    elif path.is_file():
        directory.mkdir()
        (directory / path.name).symlink_to(path)
    else:
        raise ValueError(f"{uri} is neither a file nor a folder ({path})")


def _pack(archive: Path, directories: Sequence[Path], say: Callable[[str], None]) -> None:
    """The contents of all `directories` in one tar.gz; of two files of one name the first stays, and `say` is
    told where they are not alike.

    Links are followed: what they lead to is not there where the archive is unpacked. One that leads nowhere,
    or in circles, is packed as the link it is where no directory has more of that name, and `say` is told.
    """
    found: dict[str, Path] = {}
    lost: dict[str, Path] = {}
    left_out = []
    for directory in directories:
        for path, is_lost in _all_below(directory, ()):
            name = path.relative_to(directory).as_posix()
            first = (lost if is_lost else found).setdefault(name, path)
            if not is_lost and not _are_alike(first, path):
                left_out.append(f"{name} ({path})")
    links = {name: path for name, path in lost.items() if name not in found}
    with tarfile.open(archive, "w:gz", dereference=True) as tar:
        for name, path in found.items():
            tar.add(path, name, recursive=False)
        tar.dereference = False
        for name, path in links.items():
            tar.add(path, name, recursive=False)
    if left_out:
        say(
            f"several hosts have files of one name, of which {archive.name} has the first host's: not in it "
            f"are {', '.join(left_out)}"
        )
    if links:
        named = ", ".join(f"{name} -> {os.readlink(path)}" for name, path in links.items())
        say(f"links that lead nowhere or in circles, in {archive.name} as links: {named}")


def _are_alike(first: Path, other: Path) -> bool:
    """Whether both are folders, or files of the same contents."""
    if first.is_dir() or other.is_dir():
        return first.is_dir() and other.is_dir()
    return first is other or filecmp.cmp(first, other, shallow=False)


def _all_below(directory: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, bool]]:
    """All files and folders in it, sorted, those that links lead to as well; none where it is not there.
    With each, whether it is a link that leads nowhere or in circles.

    Args:
        above: the folders that lead to it, without links.
    """
    above = (*above, directory.resolve())
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        is_lost = path.is_symlink() and _is_lost(path, above)
        yield path, is_lost
        if not is_lost and path.is_dir():
            yield from _all_below(path, above)


def _is_lost(link: Path, above: tuple[Path, ...]) -> bool:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # nowhere; in circles, a RuntimeError before Python 3.13
        return True
    return any(folder.is_relative_to(target) for folder in above)


def _write(path: Path, content: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file, indent=1)
