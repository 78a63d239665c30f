"""The store of captures on disk, each under a key that holds everything that it depends on.

    key  ->  forward 0, 1, ..  (one per guard on sizes)  ->  backward, per layout of gradients

What cannot be keyed with certainty is not kept, with the reason on record. Nothing is unpickled, and a text that is
executed (kernels, guards) is one that the cache verified, of a format that this version wrote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import FusegradError
from ...tracer.methods import methods
from ...tracer.reads.fingerprint import (
    NotKeyed,
    fingerprint,
    sources_of_ours,
    torch_flags,
    torch_installation,
    value_text,
)
from ...tracer.torch_private import function_modes
from ..cache import entry_files
from ..cache import store as cache
from ..cache.locks import FileLock, is_held_here
from ..capture.captured_backward import BackwardEntry, predicted_kinds
from ..capture.guards import global_state
from ..execution import targets
from ..settings.config import KERNEL_BACKENDS, settings
from ..settings.counters import count
from ..specialize.specialization import Specialization
from ..values.gradient_layouts import canonical_layout, layout_class
from .plan_documents import NotKept
from .stored_specialization import Stored, backward_document, forward_document, kinds_text

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor
FORMAT = 4
FLAGS = ("boxed_grads_call", "clear_saved_tensors_on_access", "generate_vmap_rule", "is_traceable")
GUARDS = 4
"""Captures under one key, told apart by what they assume about sizes."""
CAPTURE_SECONDS = 10.0
"""How long a process waits for another that captures the same. Its user's code may wait for this process, too."""
FAULTS = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, FusegradError, StopIteration)
"""What reading an entry may raise that verified and is none of ours."""


OFF = "traces are not cached (config.store)"
NO_KERNELS = "only traces for kernels are cached"


def lookup(compiler: Compiled, args: Sequence[Any]) -> tuple[Specialization | None, NullStore]:
    """The stored specialisation for these arguments, and where to keep what is captured."""
    try:
        backend, device = compiler.options.backend_for(args), _device(args)
        keeper = CaptureStore(compiler, _key(compiler, args, backend, device), backend, device)
    except (NotKeyed, OSError) as error:
        return None, NullStore(str(error))
    stored = keeper.forward(args)
    if stored is not None:
        count("from_disk")
    return stored, keeper


class NullStore:
    """The store of captures that are not kept, with the reason."""

    def __init__(self, why: str) -> None:
        self.why: str | None = why
        self.is_found = False

    @property
    def status(self) -> str:
        """The state of a capture on disk; "" where nothing was to be expected."""
        if self.why in (OFF, NO_KERNELS):
            return ""
        if self.is_found:
            return "from disk"
        return "cached on disk" if self.why is None else f"traced in every process: {self.why}"

    def release(self) -> None:
        """Other processes need not wait."""

    def claim_backward(self, gradients: Sequence[Any]) -> FileLock | None:
        """The right to capture backward for such gradients."""
        return None

    def keep_forward(self, spec: Specialization) -> None:
        """Nothing is written."""

    def keep_backward(self, spec: Specialization, gradients: Sequence[Any]) -> None:
        """Nothing is written."""


# ------------------------------------------------------------------ the key
def _key(compiler: Compiled, args: Sequence[Any], backend: str, device: torch.device) -> str:
    _require_plain(compiler, backend)
    cls = compiler.user.cls
    parts = [
        FORMAT,
        IMPORTED,
        f"{cls.__module__}.{cls.__qualname__} {[getattr(cls, flag, None) for flag in FLAGS]}",
        *fingerprint(list(methods(cls).values())),
        *torch_flags(),
        repr((settings(), global_state(), compiler.options.dynamic, backend, targets.target_for(backend, device))),
        *(_argument(i, a) for i, a in enumerate(args)),
    ]
    return cache.key_of("capture", *parts)


def _require_plain(compiler: Compiled, backend: str) -> None:
    """Raise NotKeyed for what is left out on purpose: it is captured in each process."""
    state = global_state()
    reasons = {
        OFF: not settings().store,
        NO_KERNELS: backend not in KERNEL_BACKENDS,
        "kernels are tuned": targets.is_tuned(backend),
        "its backward is derived": compiler.user.derives_backward or compiler.user.plain_function is not None,
        "autocast is on, or inference mode": bool(state[0]) or bool(state[1]) or torch.is_inference_mode_enabled(),
        "a mode follows torch's functions": bool(function_modes()),
        "a method runs in eager": any(map(compiler.keys.opaque, compiler.user.methods.roles())),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        raise NotKeyed(why)


def installation() -> str:
    """fusegrad, torch and the rest, as they are on disk."""
    return repr((sorted(entry_files.versions().items()), torch_installation(), list(sources_of_ours())))


IMPORTED = installation()
"""As they were when this process imported them: its sources may be edited while it runs."""


def _device(args: Sequence[Any]) -> torch.device:
    devices = {a.device for a in args if isinstance(a, Tensor)}
    if len(devices) != 1:
        raise NotKeyed("its tensors are on no device, or on several")
    return devices.pop()


def _argument(index: int, value: Any) -> str:
    if not isinstance(value, Tensor):
        return value_text(f"argument {index}", value)
    if value.is_conj() or value.is_neg():
        raise NotKeyed("an argument is a lazy conjugate")
    return f"{value.dtype} {value.device} {value.requires_grad} {value.dim()} {_layout(value)}"


def _layout(tensor: Tensor) -> str:
    """The facts that captures often assume: which sizes are 0 and 1, and the order of the axes in memory."""
    sizes = "".join(str(n) if n < 2 else "n" for n in tensor.shape)
    order = sorted(range(tensor.dim()), key=lambda i: (-tensor.stride()[i], i))
    return f"{sizes} {order} {tensor.is_contiguous()} {[i for i, s in enumerate(tensor.stride()) if s == 0]}"


# ------------------------------------------------------------------ the entries
class CaptureStore(NullStore):
    """Reads and writes the entries of one key. Whatever goes wrong with them, the capture is made again."""

    def __init__(self, compiler: Compiled, key: str, backend: str, device: torch.device) -> None:
        self.compiler, self.key, self.backend, self.device = compiler, key, backend, device
        self.why, self.is_found = None, False
        self.claim: FileLock | None = None  # held from where nothing is found until it is kept
        self.reserved: FileLock | None = None  # of the backward that is expected next
        self.place: str | None = None  # the next free one, or that of the forward in use
        self.stored: Stored | None = None
        self.kept_kinds: set[str] = set()  # layouts of gradients
        self.is_done = False

    def forward(self, args: Sequence[Any]) -> Specialization | None:
        """The stored forward whose guard these arguments fulfil."""
        for number in range(GUARDS):
            self.release()
            self.place = cache.key_of(self.key, number)
            document = _read(self.place) or self._read_when_claimed(self.place)
            if document is None:
                return None
            stored = self._stored(document, args)
            if stored is None:
                return None
            if stored.captured.guard([args[i] for i in stored.captured.slots]):
                self.place = cache.key_of(self.place, _sum(document))
                self.stored, stored.spec.keeper, stored.spec.backward.find_stored = stored, self, self.backward
                self.is_done = self.is_found = True
                return stored.spec
        self.place, self.why = None, f"there are {GUARDS} traces for other sizes"
        return None

    def _read_when_claimed(self, place: str) -> Any:
        """The document that another process wrote while this one waited for it; None: this process is to capture."""
        self.claim = _claimed(place)
        document = _read(place)
        if document is not None:
            self.release()
        return document

    def release(self) -> None:
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.release()

    def _stored(self, document: Any, args: Sequence[Any]) -> Stored | None:
        compiler = self.compiler
        try:
            cls, reads, dynamic = compiler.user.cls, compiler.keys.reads_now(), compiler.options.dynamic
            return Stored(cls, args, reads, dynamic, compiler.ledger.report, document["forward"], self.backend)
        except FAULTS:
            assert self.place is not None
            cache.drop(self.place)
            return None

    def backward(self, kinds: tuple[Any, ...]) -> BackwardEntry | None:
        """The stored backward for gradients of these layouts; none is looked for once something is not kept."""
        assert self.stored is not None
        if self.place is None or not self.stored.is_current():
            return None
        name = cache.key_of(self.place, kinds_text(kinds))
        document = _read(name)
        if document is None:
            return None
        try:
            entry = self.stored.entry_from(kinds, document["backward"], self.device)
        except FAULTS:
            cache.drop(name)
            return None
        self.kept_kinds.add(kinds_text(kinds))
        return entry

    def claim_backward(self, gradients: Sequence[Any]) -> FileLock | None:
        reserved, self.reserved = self.reserved, None
        if self.place is None or not self.is_done:
            return None
        place = cache.key_of(self.place, kinds_text(_kinds(gradients)))
        if reserved is not None and reserved.name == place:
            return reserved
        if reserved is not None:
            reserved.release()
        return _claimed(place)

    def _reserve_backward(self, spec: Specialization) -> None:
        """Who captured forward captures backward, too, if it comes next: another would have to capture both for it."""
        if self.place is not None and torch.is_grad_enabled() and any(spec.captured.forward.needs_input_grad):
            self.reserved = _claimed(cache.key_of(self.place, kinds_text(predicted_kinds(spec.captured))), seconds=0.0)

    # -------------------------------------------------------------- after a call
    def keep_forward(self, spec: Specialization) -> None:
        """Writes forward after its first run."""
        if self.is_done or self.place is None or spec.captured.outside_state() != spec.captured.outside_at_capture:
            self.reserved = None  # forward came again, and no backward between
            self.release()
            return
        self.is_done = True
        try:
            self._keep_forward(spec)
            self._reserve_backward(spec)
        finally:
            self.release()

    def _keep_forward(self, spec: Specialization) -> None:
        assert self.place is not None
        try:
            self._require_nothing_said()
            document = {"forward": forward_document(spec, self.backend, self.device)}
        except (NotKept, KeyError) as error:
            self._give_up(error)
            return
        _publish(self.place, document)
        self.place = cache.key_of(self.place, _sum(document))

    def keep_backward(self, spec: Specialization, gradients: Sequence[Any]) -> None:
        """Writes backward after its first run for gradients of these layouts."""
        kinds = _kinds(gradients)
        if self.place is None or not self.is_done or (name := kinds_text(kinds)) in self.kept_kinds:
            return
        # The key holds the state at forward's capture: backward's trace under another state is not what it names.
        if spec.captured.outside_state() != spec.captured.outside_at_capture:
            return
        self.kept_kinds.add(name)
        entry = next(iter(spec.backward.other_entries(kinds)), None)
        if entry is None:
            return
        try:
            self._require_nothing_said()
            document = {"backward": backward_document(spec, entry, self.backend, self.device)}
        except (NotKept, KeyError) as error:
            self._give_up(error)
            return
        _publish(cache.key_of(self.place, name), document)

    def _require_nothing_said(self) -> None:
        reasons = [record.reason for record in self.compiler.ledger.records.values() if record.reason]
        if reasons:
            raise NotKept(reasons[0])

    def _give_up(self, error: Exception) -> None:
        self.why, self.place = str(error), None


def _kinds(gradients: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(layout_class(canonical_layout(g)) for g in gradients)


def _claimed(place: str, seconds: float = CAPTURE_SECONDS) -> FileLock | None:
    """The right to capture what belongs there, if it can be had soon and is not this process's already."""
    return None if is_held_here(place) else cache.default().claim(place, seconds)


def _sum(document: Any) -> str:
    return hashlib.sha256(_text(document)).hexdigest()


def _text(document: Any) -> bytes:
    return json.dumps(document, sort_keys=False, separators=(",", ":")).encode()


def _publish(name: str, document: Any) -> None:
    """Writes an entry, also where there is one that is not what it should be."""
    files = {"capture.json": _text({"format": FORMAT, **document})}
    if cache.get(name) != files:
        cache.drop(name)
        cache.put(name, files)


def _read(name: str) -> Any:
    files = cache.get(name)
    if files is None:
        return None
    try:
        document = json.loads(files["capture.json"])
        if document.pop("format") != FORMAT:
            raise ValueError("another format")
    except FAULTS:
        cache.drop(name)
        return None
    return document
