"""Functions of the package whose faults reach the caller, each with the reason why no other answer is left."""

ENTRY = "torch calls it, and it holds the net: nothing of ours is around it"
GIVES = "it hands the user's own rule what forward kept: there is no other way to that"
ONCE = "it unpacks what was saved, which is done once: hooks of the user's run then"
C = "autograd asks a fake tensor for its device from C++ that lets no error through: an error there ends the process"
AFTER = "it runs after an argument was written to, which cannot be taken back"

REVIEWED: dict[str, str] = {
    "runtime/interop.py:applied.<locals>._fusegrad_apply": ENTRY,
    "runtime/interop.py:function_shown.<locals>.compiled": ENTRY,
    "runtime/plain.py:compile_function.<locals>.run": ENTRY,
    "runtime/interop.py:shown.<locals>.backward": ENTRY,
    "runtime/node.py:_backward.<locals>.backward": ENTRY,
    "runtime/function.py:Compiler.backward": ENTRY,
    "runtime/whole.py:Rules.backward": ENTRY,
    "runtime/function.py:_unpacked": ONCE,
    "tracer/recorder.py:Recorder.__torch_dispatch__": C,
    "tracer/metadata.py:Fakes.__torch_dispatch__": C,
    **dict.fromkeys((
        "runtime/asked.py:is_outer",
        "runtime/specialization.py:Specialization._as_followed",
        "runtime/specialization.py:Specialization.as_autograd_takes",
        "runtime/specialization.py:Specialization.attributes",
        "runtime/specialization.py:Specialization.constants_at",
        "runtime/specialization.py:Specialization.users_backward",
        "runtime/specialization.py:followed",
        "runtime/whole.py:Rules._backward",
        "runtime/whole.py:Rules._per_output",
        "runtime/whole.py:Whole.as_written",
        "tracer/arithmetic.py:computed",
        "tracer/containers.py:_rebuilder",
        "tracer/containers.py:exchanged",
        "tracer/containers.py:filled",
        "tracer/containers.py:holes",
        "tracer/function.py:_is_size",
        "tracer/function.py:_rebound",
        "tracer/function.py:as_tuple",
        "tracer/function.py:put_together",
        "tracer/function.py:rebind",
        "tracer/function.py:rebind.<locals>.leaf",
        "tracer/function.py:run_backward",
        "tracer/function.py:takes_boxed_gradients",
        "tracer/torch_private.py:is_fake",
        "tracer/torch_private.py:is_traced_elsewhere",
    ), GIVES),
}  # fmt: skip
