"""The model loader ``w4pack`` of vLLM: each rank reads only its slices, by threads, straight to the device.

The engine's own model code says where every tensor goes; ``lazy`` writes it down and moves the bytes at once.
It reads any safetensors checkpoint, and is what ``--load-format auto`` takes for an artifact.
"""

import copy
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

from w4pack.convert.errors import SourceError, UsageError
from w4pack.convert.files.checkpoint import CONFIG
from w4pack.convert.files.manifestform import MANIFEST
from w4pack.kernels import hashes, transfer
from w4pack.kernels.vllm import completeness, source
from w4pack.kernels.vllm.config import W4PackConfig
from w4pack.kernels.vllm.lazy import FileTensor, Ledger, Watch, names
from w4pack.kernels.vllm.unusable import METHOD

FORMAT = "w4pack"
OPTIONS: dict[str, tuple[type[int], int]] = {
    "threads": (int, 1),
    "check_hashes": (bool, False),
}  # type, least
MODEL_ERRORS = (AssertionError, IndexError, KeyError, RuntimeError, ValueError)  # of code that takes tensors


class W4PackModelLoader(DefaultModelLoader):
    """Loads artifacts, and any other safetensors checkpoint. Finds files as the engine's own loader does.

    Args:
        load_config: of the engine; ``model_loader_extra_config`` may hold ``threads``, and ``check_hashes``
            to compare an artifact's tensors with the sha256 in its manifest first.
    """

    def __init__(self, load_config: Any) -> None:
        self.options = _options(load_config.model_loader_extra_config)
        plain = copy.copy(load_config)
        plain.load_format, plain.model_loader_extra_config = "safetensors", {}
        super().__init__(plain)
        self._model: nn.Module | None = None  # that is being loaded
        self._running: nn.Module | None = None  # that takes weights once more
        self._config: Any = None
        self._watch = ExitStack()  # over the model's code
        self._read: list[completeness.Read] = []  # what the files hold that the code was given
        self._taking: FileTensor | None = None  # what the engine's code was given last
        self._is_online = False

    def load_model(self, vllm_config: Any, model_config: Any, **more: Any) -> Any:
        """Make a model and load it. An artifact of the Hub is there before its layers are made.

        Raises:
            Refused: an artifact that this version does not run, ranks that cut tiles or groups.
            SourceError: as ``load_weights``.
        """
        config = vllm_config.quant_config
        self._is_online = getattr(config, "online_quantization_config", None) is not None
        if isinstance(config, W4PackConfig) and config.source.artifact is None:
            config.attach(source.of_folder(self._folder(model_config.model, model_config.revision)))
        return super().load_model(vllm_config=vllm_config, model_config=model_config, **more)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill the model's parameters.

        Raises:
            SourceError: of an artifact, tensors that are missing, too many, or not as they were written; of
                any checkpoint, a tensor that the model's code stops at.
        """
        self._model, self._config = model, model_config
        if model_config.quantization == METHOD:
            completeness.check_built(model, model_config, is_online=self._is_online)
        self.counter_before_loading_weights = time.perf_counter()  # the engine logs how long it took
        try:
            with self._watch:
                super().load_weights(model, model_config)
                for _, ledger in self._read:  # of code that did not ask for all tensors
                    ledger.execute(self.options.get("threads"))
            if model_config.quantization == METHOD:
                completeness.check_taken(model, self._read, model_config)
        except MODEL_ERRORS as err:
            if self._taking is None or isinstance(err, torch.OutOfMemoryError):
                raise
            raise completeness.not_taken(self._taking.info, err, model_config) from err
        finally:
            self._model, self._taking, self._read = None, None, []

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
        """Yield (name, tensor) of all weights: unread while a model is loaded, else read one by one.

        The engine calls it by itself to reload weights, and then keeps tensors of a layer to itself until it
        has all of them: a layer that lacks one would stay as it was.

        Raises:
            SourceError: of an artifact, other tensors than those that the engine was started with.
        """
        self._config = model_config
        self._running = model if self._model is None else None
        return super().get_all_weights(model_config, model)

    def _get_weights_iterator(self, origin: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield (name, unread tensor); when the engine has asked for all of them, their bytes are moved.

        So whatever the model's code does behind its loop sees tensors that are there.
        """
        folder = self._folder(origin.model_or_path, origin.revision, origin.subfolder)
        tensors, places = transfer.file_tensors(folder)
        if self._config.quantization == METHOD:
            self._check_files(folder)
        ledger, threads = Ledger(places), self.options.get("threads")
        if self._model is None:
            for name, tensor in names(tensors, ledger):
                yield origin.prefix + name, tensor.whole()
            return
        self._read.append((tensors, ledger))
        self._watch.enter_context(Watch(ledger, threads))  # until load_weights ends or fails
        for name, tensor in names(tensors, ledger):
            self._taking = tensor
            yield origin.prefix + name, tensor
        self._taking = None
        ledger.execute(threads)

    def _folder(self, name: str, revision: str | None, subfolder: str | None = None) -> str:
        """Return the folder of a model, with its settings, downloaded if need be.

        The engine keeps settings in the Hub's own cache, and with ``--download-dir`` only weights elsewhere.

        Raises:
            SourceError: the model has no safetensors files.
        """
        try:
            folder: str = self._prepare_weights(name, subfolder, revision, False, None)[0]
        except RuntimeError as err:
            raise SourceError(
                "this loader reads safetensors files only",
                code="not-safetensors",
                where=name,
                expected="*.safetensors",
                found=str(err),
                hint=f"vllm serve {name} --load-format auto",
            ) from err
        if not source.is_folder(name):
            for file in (CONFIG, MANIFEST):
                if not (Path(folder) / file).is_file():
                    path = file if subfolder is None else f"{subfolder}/{file}"
                    download_weights_from_hf(name, self.load_config.download_dir, [path], revision)
        return folder

    def _check_files(self, folder: str) -> None:
        """Check the headers once more, of the files that are read: they may have come from the Hub since.

        Raises:
            SourceError: see ``hashes``.
            VerifyError: tensors that were exchanged, or whose hashes differ.
        """
        found = source.of_folder(folder).artifact
        assert found is not None
        if self._running is not None:
            completeness.check_same(self._running, found)
        if self.options.get("check_hashes"):
            hashes.check(found, set(found.tensors), self.options.get("threads"))
        hashes.tell(hashes.check_samples(found))


def auto(own: type[Any]) -> type[Any]:
    """Return what ``--load-format auto`` takes: ours for an artifact, the engine's ``own`` for all else."""

    class AutoModelLoader(own):
        """The engine's own loader, except for artifacts."""

        w4pack = True

        def download_model(self, model_config: Any) -> None:
            """Download a model."""
            if model_config.quantization == METHOD:
                W4PackModelLoader(self.load_config).download_model(model_config)
            else:
                super().download_model(model_config)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Fill a model's parameters."""
            if model_config.quantization == METHOD:
                W4PackModelLoader(self.load_config).load_weights(model, model_config)
            else:
                super().load_weights(model, model_config)

        def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
            """Yield (name, tensor) of all weights: the engine asks for them by itself to reload them."""
            if model_config.quantization == METHOD:
                return W4PackModelLoader(self.load_config).get_all_weights(model_config, model)
            return super().get_all_weights(model_config, model)

        def load_model(self, vllm_config: Any, model_config: Any, **more: Any) -> Any:
            """Make a model and load it."""
            how = {"vllm_config": vllm_config, "model_config": model_config, **more}
            if model_config.quantization == METHOD:
                return W4PackModelLoader(self.load_config).load_model(**how)
            return super().load_model(**how)

    return AutoModelLoader


def register_loader() -> None:
    """Register ``--load-format w4pack``, and let ``auto`` choose it for artifacts. May be called again."""
    known = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    if FORMAT not in known:
        register_model_loader(FORMAT)(W4PackModelLoader)
    if not getattr(known["auto"], "w4pack", False):
        known["auto"] = auto(known["auto"])  # not by registering: that warns, though nothing else changes


def _options(given: Any) -> dict[str, Any]:
    """Return the options of this loader.

    Raises:
        UsageError: one that it does not know.
    """
    for name, value in given.items():
        kind, least = OPTIONS.get(name, (None, 0))
        if kind is None or type(value) is not kind or value < least:
            raise UsageError(
                "the loader does not take this option",
                code="loader-option",
                where=f"--model-loader-extra-config: {name}",
                expected="threads, at least 1; check_hashes, true or false",
                found=repr(value),
            )
    return dict(given)
