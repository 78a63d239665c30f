"""Functions of the package whose faults reach the caller, each with the reason why no other answer is left."""

ENTRY = "torch calls it, and it holds the net: nothing of ours is around it"
GIVES = "it hands the user's own rule what forward kept: there is no other way to that"
AFTER = "it runs after an argument was written to, which cannot be taken back"

REVIEWED: dict[str, str] = {
    "runtime/interop.py:applied.<locals>._fusegrad_apply": ENTRY,
    "runtime/interop.py:function_shown.<locals>.compiled": ENTRY,
    "runtime/plain.py:compile_function.<locals>.run": ENTRY,
    "runtime/interop.py:shown.<locals>.backward": ENTRY,
    "runtime/node.py:_backward.<locals>.backward": ENTRY,
    "runtime/function.py:Compiler.backward": ENTRY,
    **dict.fromkeys((
        "runtime/specialization.py:Specialization.attributes",
        "runtime/specialization.py:Specialization.constants_at",
        "runtime/specialization.py:Specialization.users_backward",
        "runtime/specialization.py:followed",
        "tracer/containers.py:_rebuilder",
        "tracer/containers.py:exchanged",
        "tracer/containers.py:filled",
        "tracer/containers.py:holes",
        "tracer/function.py:_is_size",
        "tracer/function.py:put_together",
        "tracer/function.py:rebind",
        "tracer/function.py:rebind.<locals>.leaf",
        "tracer/function.py:run_backward",
        "tracer/function.py:takes_boxed_gradients",
    ), GIVES),
}  # fmt: skip
