"""One contestant of data_files.py in a process of its own, pinned to one core.

    python data_contestants.py TASK NAME FOLDER

It makes itself ready, says so in a line, and then runs an epoch for every line that it is given. It
answers each with the seconds of the processor that the epoch took, threads included, those of the
clock, and how many samples it had. Every epoch is shuffled. No loader processes are started: all
work is on this core.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

IMAGE_BATCH, TOKEN_BATCH, ROW_BATCH, SMALL_BATCH, OBJECT_BATCH = 64, 32, 1024, 256, 32
CROP = 224
TOKENS, DRAWN_WINDOWS = 1024, 20_000
"""Tokens of a sample, and the samples of a turn."""
SHUFFLE_BUFFER = 1000

FLOOR = "PIL alone, from memory"

Epoch = Callable[[int], Iterable[int]]
"""Reads an epoch and yields the samples of each batch."""
Maker = Callable[[Path], Epoch]
ReadSample = Callable[[dict[str, Any]], dict[str, Any]]
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
"""What litData decodes its own type of JPEGs with."""


def open_ours(dataset: Any, batch_size: int, batches: int | None = None) -> Epoch:
    """What a training takes its batches from, without loader processes."""
    from echelon.data.batches import DatasetSource
    from echelon.data.epoch_plan import make_epoch_plan

    device = torch.device("cpu")
    source = DatasetSource(dataset, 0, device)
    plan = make_epoch_plan(len(dataset), batch_size, 0, data=dataset)

    def read_epoch(epoch: int) -> Iterator[int]:
        order = plan.make_order(epoch, 0, 1, device)
        for number, batch in enumerate(source.iter_batches(order, 0, device)):
            if number == batches:
                return
            yield batch.sample_count

    return read_epoch


def iterate(loader: Iterable[Any], set_epoch: Callable[[int], Any] | None = None) -> Epoch:
    """Batches that begin with a tensor, whether in a tuple or in a dict."""

    def read_epoch(epoch: int) -> Iterator[int]:
        if set_epoch is not None:
            set_epoch(epoch)
        for batch in loader:
            values = batch.values() if isinstance(batch, dict) else batch
            yield len(next(iter(values)))

    return read_epoch


@cache
def import_streaming() -> Any:
    """MosaicML's streaming without its collections of data sets, which need a torchvision that
    fits this build of torch."""
    spec = importlib.util.find_spec("streaming")
    assert spec is not None
    assert spec.origin is not None
    package = ModuleType("streaming")
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["streaming"] = package
    from streaming import base

    return base


# --- pictures -----------------------------------------------------------------------------------


def decode_picture(data: bytes) -> Any:
    """As the documentation of the peers decodes, and of litData where bytes are stored."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def crop_picture(image: Any) -> torch.Tensor:
    """A random crop as rows of pixels, which a GPU turns and scales."""
    x = random.randrange(image.width - CROP + 1)
    y = random.randrange(image.height - CROP + 1)
    return torch.from_numpy(np.array(image.crop((x, y, x + CROP, y + CROP))))


def crop_pixels(pixels: Any) -> Any:
    """The same of rows of pixels, without a copy."""
    x = random.randrange(pixels.shape[1] - CROP + 1)
    y = random.randrange(pixels.shape[0] - CROP + 1)
    return pixels[y : y + CROP, x : x + CROP]


def crop_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {"jpg": crop_pixels(sample["jpg"]), "cls": sample["cls"]}


def read_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """From bytes, for formats that do not decode."""
    return {"jpg": crop_picture(decode_picture(sample["jpg"])), "cls": sample["cls"]}


def read_pixels(sample: dict[str, Any]) -> dict[str, Any]:
    """The same with our decoder, which is there for everybody."""
    import simplejpeg

    return {"jpg": crop_pixels(simplejpeg.decode_jpeg(sample["jpg"])), "cls": sample["cls"]}


def read_images_by_echelon(folder: Path) -> Epoch:
    import echelon.data

    data = echelon.data.open(
        folder / "images" / "tar",
        columns=["jpg", "cls"],
        decode={"jpg": echelon.data.decode_pixels},
        transform=crop_sample,
    )
    return open_ours(data, IMAGE_BATCH)


def read_images_by_webdataset(folder: Path) -> Epoch:
    import webdataset

    shards = sorted(map(str, (folder / "images" / "tar").glob("*.tar")))
    data = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0)
        .shuffle(SHUFFLE_BUFFER)
        .map(lambda sample: {"jpg": sample["jpg"], "cls": int(sample["cls"])})
        .map(read_sample)
        .to_tuple("jpg", "cls")
        .batched(IMAGE_BATCH)
    )
    return iterate(webdataset.WebLoader(data, batch_size=None, num_workers=0))


def read_images_by_streaming(folder: Path) -> Epoch:
    base = import_streaming()

    class Pictures(base.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            return read_sample(super().__getitem__(at))

    data = Pictures(local=str(folder / "images" / "mds"), shuffle=True, batch_size=IMAGE_BATCH)
    return iterate(base.StreamingDataLoader(data, batch_size=IMAGE_BATCH, num_workers=0))


def read_images_by_litdata(
    folder: Path, read: ReadSample = read_sample, stored: str = "litdata"
) -> Epoch:
    import litdata

    data = litdata.StreamingDataset(str(folder / "images" / stored), shuffle=True, transform=read)
    return iterate(litdata.StreamingDataLoader(data, batch_size=IMAGE_BATCH, num_workers=0))


def crop_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    """Of what litData's own type gives: the colours first, as torchvision decodes."""
    pixels = crop_pixels(sample["jpg"].permute(1, 2, 0))
    return {"jpg": pixels, "cls": sample["cls"]}


class PictureFiles(Dataset[Any]):
    def __init__(self, folder: Path, read: ReadSample) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.read = read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, Any]:
        file = self.files[number]
        return self.read({"jpg": file.read_bytes(), "cls": int(file.parent.name)})


def read_images_from_memory(folder: Path) -> Epoch:
    """Nothing but to decode, cut and collate: what no loader that decodes by PIL can be faster
    than."""
    samples = [
        {"jpg": file.read_bytes(), "cls": int(file.parent.name)}
        for file in (folder / "images" / "files").glob("*/*.jpg")
    ]

    def read_epoch(epoch: int) -> Iterator[int]:
        random.Random(epoch).shuffle(samples)
        for at in range(0, len(samples), IMAGE_BATCH):
            batch = default_collate([read_sample(each) for each in samples[at : at + IMAGE_BATCH]])
            yield len(batch["cls"])

    return read_epoch


def read_images_by_loader(folder: Path, read: ReadSample = read_sample) -> Epoch:
    data = PictureFiles(folder / "images" / "files", read)
    return iterate(DataLoader(data, IMAGE_BATCH, shuffle=True))


# --- tokens -------------------------------------------------------------------------------------


def read_tokens_by_echelon(folder: Path) -> Epoch:
    import echelon.data

    data = echelon.data.open_tokens(folder / "tokens.bin", length=TOKENS)
    return open_ours(data, TOKEN_BATCH, DRAWN_WINDOWS // TOKEN_BATCH)


def read_tokens_in_a_loop(folder: Path) -> Epoch:
    """One mapping; every window is copied and widened, and the copies are stacked."""
    tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")

    def read_epoch(epoch: int) -> Iterator[int]:
        rng = np.random.default_rng(epoch)
        for _ in range(DRAWN_WINDOWS // TOKEN_BATCH):
            starts = rng.integers(len(tokens) - TOKENS, size=TOKEN_BATCH).tolist()
            windows = np.stack([tokens[at : at + TOKENS + 1] for at in starts]).astype(np.int64)
            batch = torch.from_numpy(windows)
            inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            yield min(len(inputs), len(targets))

    return read_epoch


def read_tokens_like_nanogpt(folder: Path) -> Epoch:
    """Its `get_batch`, word for word but for the copy to the GPU."""

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - TOKENS, (TOKEN_BATCH,))
        x = torch.stack([torch.from_numpy((data[i : i + TOKENS]).astype(np.int64)) for i in ix])
        y = torch.stack(
            [torch.from_numpy((data[i + 1 : i + 1 + TOKENS]).astype(np.int64)) for i in ix]
        )
        return x, y

    def read_epoch(epoch: int) -> Iterator[int]:
        torch.manual_seed(epoch)
        for _ in range(DRAWN_WINDOWS // TOKEN_BATCH):
            x, y = get_batch()
            yield min(len(x), len(y))

    return read_epoch


# --- rows of Parquet ----------------------------------------------------------------------------


def read_rows_by_echelon(folder: Path) -> Epoch:
    """Opened anew for every epoch: what is kept of the one before would not be there in large
    data."""
    import echelon.data

    return lambda epoch: open_ours(echelon.data.open(folder / "rows"), ROW_BATCH)(epoch)


def read_rows_by_datasets(folder: Path) -> Epoch:
    """Its Arrow copy of the files, shuffled, as tensors by batches."""
    import datasets

    files = sorted(map(str, (folder / "rows").glob("*.parquet")))
    datasets.disable_progress_bars()
    data = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(folder / "datasets")
    )

    def read_epoch(epoch: int) -> Iterator[int]:
        """A tenth of an epoch, of which the shuffle is the whole: it takes long enough."""
        shuffled = data.shuffle(seed=epoch).with_format("torch")
        for batch in islice(shuffled.iter(ROW_BATCH), len(data) // ROW_BATCH // 10):
            yield len(next(iter(batch.values())))

    return read_epoch


def read_rows_by_datasets_stream(folder: Path) -> Epoch:
    """Its stream of the files with a shuffle buffer, as tensors by batches."""
    import datasets

    files = sorted(map(str, (folder / "rows").glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)

    def read_epoch(epoch: int) -> Iterator[int]:
        shuffled = data.shuffle(seed=epoch, buffer_size=SHUFFLE_BUFFER).with_format("torch")
        for batch in shuffled.iter(ROW_BATCH):
            yield len(next(iter(batch.values())))

    return read_epoch


def read_rows_by_pyarrow(folder: Path) -> Epoch:
    """In the order of the file: it cannot shuffle. Numbers become tensors, and texts str."""
    from pyarrow import parquet

    files = sorted((folder / "rows").glob("*.parquet"))

    def read_epoch(epoch: int) -> Iterator[int]:
        for file in files:
            opened = parquet.ParquetFile(file)
            for batch in opened.iter_batches(ROW_BATCH, use_threads=False):
                made = {
                    name: column.to_pylist()
                    if column.type == "string"
                    else torch.from_numpy(column.to_numpy().copy())
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                yield len(made["number_0"])

    return read_epoch


# --- small samples ------------------------------------------------------------------------------


def read_small_by_echelon(folder: Path) -> Epoch:
    import echelon.data

    return open_ours(echelon.data.open(folder / "small" / "samples.npy"), SMALL_BATCH)


class SmallSamples(Dataset[Any]):
    def __init__(self, file: Path) -> None:
        self.values = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.values[number].copy())


def read_small_by_loader(folder: Path) -> Epoch:
    data = SmallSamples(folder / "small" / "samples.npy")
    loader = DataLoader(data, SMALL_BATCH, shuffle=True)
    return lambda epoch: (len(batch) for batch in loader)


def read_small_by_streaming(folder: Path) -> Epoch:
    base = import_streaming()
    data = base.StreamingDataset(
        local=str(folder / "small" / "mds"), shuffle=True, batch_size=SMALL_BATCH
    )
    return iterate(base.StreamingDataLoader(data, batch_size=SMALL_BATCH, num_workers=0))


# --- objects of a store -------------------------------------------------------------------------


def open_at_first(open_data: Callable[[], Epoch]) -> Epoch:
    """What opens the data with its first epoch, whose time includes that, and keeps it."""
    opened = cache(open_data)
    return lambda epoch: opened()(epoch)


def read_objects_by_echelon(folder: Path) -> Epoch:
    import echelon.data
    import echelon.data.sample_fetcher  # with all that a training imports, as of the others

    os.environ["ECHELON_CACHE"] = str(folder)
    url = f"s3://{os.environ['BENCH_BUCKET']}/tar"
    return open_at_first(lambda: open_ours(echelon.data.open(url), OBJECT_BATCH))


def read_objects_by_webdataset(folder: Path) -> Epoch:
    """Through curl, as it reads all addresses of the web."""
    import webdataset

    names = os.environ["BENCH_SHARDS"].split()
    place = f"{os.environ['AWS_ENDPOINT_URL']}/{os.environ['BENCH_BUCKET']}/tar"
    shards = [f"pipe:curl -s -f {place}/{name}" for name in names]

    def read_epoch(epoch: int) -> Iterator[int]:
        data = (
            webdataset.WebDataset(shards, shardshuffle=len(shards), seed=epoch)
            .shuffle(SHUFFLE_BUFFER)
            .to_tuple("bin")
            .batched(OBJECT_BATCH)
        )
        yield from iterate(webdataset.WebLoader(data, batch_size=None, num_workers=0))(epoch)

    return read_epoch


def read_objects_by_streaming(folder: Path) -> Epoch:
    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    base = import_streaming()
    remote = f"s3://{os.environ['BENCH_BUCKET']}/mds"

    def open_data() -> Epoch:
        data = base.StreamingDataset(
            remote=remote, local=str(folder / "mds"), shuffle=True, batch_size=OBJECT_BATCH
        )
        return iterate(base.StreamingDataLoader(data, batch_size=OBJECT_BATCH, num_workers=0))

    return open_at_first(open_data)


def read_objects_by_litdata(folder: Path) -> Epoch:
    """With http allowed, which it has no option for."""
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    remote = f"s3://{os.environ['BENCH_BUCKET']}/litdata"

    def open_data() -> Epoch:
        data = litdata.StreamingDataset(
            remote, cache_dir=str(folder), shuffle=True, storage_options=options
        )
        return iterate(litdata.StreamingDataLoader(data, batch_size=OBJECT_BATCH, num_workers=0))

    return open_at_first(open_data)


CONTESTANTS: dict[str, dict[str, Maker]] = {
    "images": {
        "Echelon": read_images_by_echelon,
        "webdataset": read_images_by_webdataset,
        "streaming": read_images_by_streaming,
        "litData": read_images_by_litdata,
        "litData, by simplejpeg": partial(read_images_by_litdata, read=read_pixels),
        "DataLoader over files": read_images_by_loader,
        "DataLoader over files, by simplejpeg": partial(read_images_by_loader, read=read_pixels),
        FLOOR: read_images_from_memory,
    },
    "tokens": {
        "Echelon": read_tokens_by_echelon,
        "a memmap loop": read_tokens_in_a_loop,
        "nanoGPT's get_batch": read_tokens_like_nanogpt,
    },
    "rows": {
        "Echelon": read_rows_by_echelon,
        "datasets": read_rows_by_datasets,
        "datasets, streaming": read_rows_by_datasets_stream,
        "pyarrow's iter_batches": read_rows_by_pyarrow,
    },
    "small": {
        "Echelon": read_small_by_echelon,
        "DataLoader": read_small_by_loader,
        "streaming": read_small_by_streaming,
    },
    "objects": {
        "Echelon": read_objects_by_echelon,
        "webdataset": read_objects_by_webdataset,
        "streaming": read_objects_by_streaming,
        "litData": read_objects_by_litdata,
    },
}
if HAS_TORCHVISION:
    CONTESTANTS["images"]["litData, its own type, by torchvision"] = partial(
        read_images_by_litdata, read=crop_tensor, stored="litdata-jpeg"
    )


def main(task: str, name: str, folder: Path, core: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    read_epoch = CONTESTANTS[task][name](folder)
    print("ready", file=answers, flush=True)
    for epoch, _ in enumerate(sys.stdin):
        begun, begun_at = time.process_time(), time.perf_counter()
        samples = sum(read_epoch(epoch))
        ended, ended_at = time.process_time(), time.perf_counter()
        print(ended - begun, ended_at - begun_at, samples, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
