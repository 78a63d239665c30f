"""Every reason that a user may meet, with a short code that stays: its text, its meaning, its remedy.

FG0xx  why a method, or a part of it, is not compiled      FG2xx  errors
FG1xx  compiled, but with more launches than one each      FG9xx  mistakes of fusegrad itself
A reason finds its row by its words, an error by its class. A law test reads the reasons out of the sources.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class Code(NamedTuple):
    """says: the text as it is shown. words: patterns of its beginning, or the names of the error's classes."""

    code: str
    says: str
    meaning: str
    fix: str
    words: tuple[str, ...]


CODES = (
    # -------------------------------------------------------------- FG00x: declared, or another method's doing
    Code(
        "FG001", "it declares is_traceable = False",
        "The author keeps this method from being traced: it runs in eager, on real tensors.",
        "Nothing, if that is meant. Else declare is_traceable = True, or leave it out to have the method tried.",
        (r"it declares (is_)?traceable", r"declares (is_)?traceable", r"it is compiled with traceable"),
    ),
    Code(
        "FG002", "the user's own rule runs as it is",
        "A jvp or vmap of yours is called as you wrote it; its operations are not fused.",
        "Declare the jvp traceable (`traceable = {'jvp': True}`), or delete the rule to have it derived.",
        (r"the user's own rule runs as it is",),
    ),
    Code(
        "FG003", "over an opaque node no rule is derived; under transforms the class runs in eager",
        "The method calls something that runs in eager. Its derivative is unknown, so no rule is derived over it.",
        "Make the nested call traceable, or write jvp and vmap staticmethods yourself.",
        (r"over an opaque node no rule is derived", r"forward calls `.*`, which is opaque", r"its backward has opaque"),
    ),
    Code(
        "FG004", "forward runs in eager, so it is traced at its first call",
        "What forward leaves for backward is known only after a call, so nothing can be said of backward before it.",
        "Call the class once, forward and backward, and explain it again.",
        (r"forward runs in eager", r"figures are for the sizes", r"no call has reached it",
         r".*: its segments are known after a call"),
    ),
    Code(
        "FG005", "it is compiled with derive_jvp=False",
        "Forward mode is turned off for this class; torch's own error is raised there.",
        "Leave derive_jvp out, or write a jvp staticmethod.",
        (r"it is compiled with derive_jvp=False",),
    ),
    Code(
        "FG006", "it is not traced while a fault is looked for",
        "`fusegrad.bisect` runs the class with some of its steps left out, one after the other.",
        "Nothing: it is a step of the search.",
        (r"it is not traced while a fault is looked for",),
    ),
    Code(
        "FG007", "a TorchDispatchMode (FlopCounterMode) is active, which is to see the operations of the class",
        "Something counts, records or keeps single operations (a selective checkpoint, a counter of FLOPs): kernels "
        "would hide them from it, so the class runs in eager while it is active.",
        "Nothing, if that is meant. Under a plain checkpoint the class runs compiled.",
        (r"a TorchDispatchMode \(",),
    ),
    Code(
        "FG008", "anomaly mode is on, which names the operation that made a NaN",
        "Under torch.autograd.detect_anomaly a backward that is differentiated again runs in eager, operation by "
        "operation, so that errors name what they name in eager. Forward and a first backward stay compiled.",
        "Nothing: leave anomaly mode once the NaN is found.",
        (r"anomaly mode is on",),
    ),
    Code(
        "FG009", "an attribute of its ctx was assigned or changed after forward",
        "`grad_fn` was written to (`y.grad_fn.alpha = 2.0`): its backward runs in eager on what is there now.",
        "Give backward what it needs as an argument of forward.",
        (r"an attribute of its ctx was assigned",),
    ),
    # -------------------------------------------------------------- FG01x: what the body does with data
    Code(
        "FG010", "its control flow depends on the data of a tensor",
        "An `if`, `while` or loop bound asks for numbers in a tensor, so no single graph is the method.",
        "Use torch.where, a mask, or clamp; or declare is_traceable = False.",
        (r"its control flow depends on the data",),
    ),
    Code(
        "FG011", "it reads the data of a tensor (`item`)",
        "A number leaves a tensor for Python (.item(), float(x), torch.equal, x.tolist()).",
        "Keep the number as a 0-d tensor, or pass it as an argument.",
        (r"it reads the data of a tensor", r"an operation's result in Python depends", r"sizes in it depend",
         r"it returns a number that dep", r"`ctx\..*` depends on the data"),
    ),
    Code(
        "FG012", "it leaves torch: a tensor is turned into a numpy array",
        "The numbers are handed to another library, whose operations no graph can hold.",
        "Write the mathematics in torch, or declare is_traceable = False.",
        (r"it leaves torch",),
    ),
    Code(
        "FG013", "it reads the memory address of a tensor",
        "data_ptr() or a buffer protocol is used: during a trace there is no memory.",
        "Wrap the call in a torch.library operator, or declare is_traceable = False.",
        (r"it reads the memory address",),
    ),
    Code(
        "FG014", "it reads `.grad_fn` of a tensor",
        "What autograd keeps beside a tensor differs from call to call and is not part of a graph.",
        "Keep it out of the method.",
        (r"it reads `\.",),
    ),
    Code(
        "FG015", "it asks for the grad mode",
        "backward may behave differently under create_graph=True, so one graph cannot be both.",
        "Drop torch.is_grad_enabled() from backward, and questions whether its gradient requires grad.",
        (r"it asks for the grad mode", r"it asks whether autograd follows a gradient"),
    ),
    Code(
        "FG016", "it turns the grad mode off or on, which forward mode does not heed",
        "Tangents pass through torch.no_grad() in eager, gradients do not: no one rule is the derivative of both.",
        "Use x.detach(), which both heed; or keep forward mode away from the function.",
        (r"it turns the grad mode",),
    ),
    Code(
        "FG017", "a distribution of torch looks at its parameters",
        "torch.distributions checks the values that it is given, which no graph can do.",
        "Pass `validate_args=False` to the distribution.",
        (r"a distribution of torch looks",),
    ),
    Code(
        "FG018", "it calls `item`, which says what is in a tensor",
        "Python asks for a number, or a size that depends on data: what comes before and after is compiled, and the "
        "answer selects what comes after. Numbers that are only computed with make no further graph.",
        "Nothing, if the question is needed. Else keep the number as a 0-d tensor, or use torch.where.",
        (r"it calls `.*`, which says what is in a tensor", r"says what is in a tensor"),
    ),
    Code(
        "FG019", "it turns inference mode on",
        "In a backward that autograd may record: what is made in inference mode cannot be recorded, nor can a write to "
        "a view that was made under torch.no_grad(); whether eager raises depends on the call.",
        "Use torch.no_grad() in backward, and write to the tensor itself.",
        (r"it turns inference mode on", r"it writes to a view that it made while the grad mode was off"),
    ),
    # -------------------------------------------------------------- FG02x: effects that a graph would lose
    Code(
        "FG020", "it calls `print`",
        "A call with an effect, or with another result each time, would happen once and never again.",
        "Take it out of the method, or declare is_traceable = False.",
        (r"it catches what torch",
         r"it calls `\w+`$", r"it calls `\w+` of [\w.]+$", r"it uses the module", r"it imports `"),
    ),
    Code(
        "FG021", "it assigns the global `counter`",
        "The method changes something outside itself, which has to happen at every call.",
        "Return the value or put it on ctx; or declare is_traceable = False.",
        (r"it assigns the (global|nonlocal)", r"it assigns `\.(?!requires_grad|_dtype|_fwd)", r"it registers a hook",
         r"it changes `.*`, which is not its own",
         r"it calls `\w+` of an? .* from outside", r"it changes the .*, which it also reads",
         r"it changes what it reaches by", r"it changed what it reads from outside",
         r"it resizes the storage of a tensor", r"its backward writes (through|to)"),
    ),
    Code(
        "FG022", "it writes to a tensor that is no argument",
        "An in-place operation on a buffer from outside has to happen at every call.",
        "Make the buffer an argument and mark_dirty it, or declare is_traceable = False.",
        (r"it writes to a tensor that is no argument",),
    ),
    Code(
        "FG023", "it changes a list that is an argument",
        "A container or object that was given is changed, which has to happen at every call.",
        "Return what is new instead.",
        (r"it changes an? \w+ that is an argument",),
    ),
    Code(
        "FG024", "it changes what is on `ctx`, which its next run reads",
        "With retain_graph=True backward runs again and would see the change; a graph would not make it.",
        "Use a local variable in backward.",
        (r"it changes what is on", r"backward changes `ctx\."),
    ),
    Code(
        "FG025", "it draws random numbers (`aten.native_dropout.default`), which its derived backward would draw anew",
        "The backward of a plain function runs its body again; its gradient has to belong to the numbers drawn.",
        "Draw outside and pass the numbers, use fusegrad.random, or write a Function that saves the mask.",
        (r"it draws random numbers",),
    ),
    Code(
        "FG026", "it assigns `._dtype` of a tensor",
        "torch.amp.custom_fwd leaves notes on the first argument of what it decorates: a ctx in the older style, a "
        "tensor where there is a setup_context.",
        "Write `forward(ctx, ...)` without setup_context where custom_fwd is used; or cast in forward by hand.",
        (r"it assigns `\._(dtype|fwd_used_autocast)`",),
    ),
    Code(
        "FG027", "it assigns `.requires_grad` of a tensor",
        "An assignment to a tensor's flag is nothing that a graph can hold.",
        "Write `x = x.detach().requires_grad_()` and torch.autograd.grad under torch.enable_grad(): that is traced.",
        (r"it assigns `\.requires_grad`",),
    ),
    Code(
        "FG028", "it draws from a torch.Generator, whose state no graph has",
        "A generator, an iterator, a file or a context variable is in another state at the next call.",
        "Draw outside and pass the numbers; or use fusegrad.random, whose draws belong to a seed that is a number.",
        (r"it draws from a torch.Generator", r"it asks for the state of a torch.Generator",
         r"it uses an? \w+ from outside",
         r"it hands on an object of a script"),
    ),
    Code(
        "FG029", "it communicates with other processes",
        "A collective of torch.distributed is no operation of a graph; lines that call one run in eager.",
        "Nothing is to be done where forward or backward is split there; else write it as lines of its own.",
        (r"it communicates",),
    ),
    # -------------------------------------------------------------- FG03x: arguments, results and what is kept
    Code(
        "FG030", "an argument is a tensor subclass or not strided",
        "Sparse, quantised and nested arguments have operations of their own; DTensors are divided by rules.",
        "Give plain tensors (`x.to_local()`, `x.to_dense()`).",
        (r"an argument is a tensor subclass", r"it is given a tensor subclass"),
    ),
    Code(
        "FG031", "an argument holds a Lock",
        "An argument has state that cannot be compared, so a graph could be used where it does not fit.",
        "Pass what the method needs of it: numbers, strings, tensors.",
        (r"an argument holds", r"an argument is a tensor that carries", r"it is given a tensor that carries",
         r"it may ask (whether|how)"),
    ),
    Code(
        "FG032", "it reads a tensor (3, 4) that cannot be found again on the next call",
        "A tensor from outside is reached in a way that the source does not show.",
        "Pass it as an argument, or refer to it by a name (a global, a closure, an attribute).",
        (r"it reads a tensor .* that cannot", r"it hands on the module", r"it reads `[^`]*`, which"),
    ),
    Code(
        "FG033", "it returns a Generator",
        "A result is no tensor and nothing that can be handed out again at every call.",
        "Return tensors, numbers, strings, or containers of these.",
        (r"it returns an? ",),
    ),
    Code(
        "FG034", "`ctx.table` is a dict with tensors",
        "What is left on ctx for backward can neither be part of a key nor be replaced by tensors of a call.",
        "Save tensors one by one: ctx.save_for_backward, or ctx.name = tensor.",
        (r"`ctx\.(?![^`]*` (is an? \w+ that holds tensors|is an? [A-Z]\w* with tensors|holds an? (function|method)|"
         r"holds an? (\w*Module|Linear)))",),
    ),
    Code(
        "FG035", "it keeps a tensor with a history of its own, made in grad mode",
        "forward turns the grad mode on and keeps the result with its graph, which a trace would lose.",
        "Save the inputs and do that work in backward, or declare is_traceable = False.",
        (r"it keeps a tensor with a history",),
    ),
    Code(
        "FG036", "mark_dirty is given something that is neither an input nor an output",
        "A mark names a tensor that autograd does not see.",
        "Mark arguments (mark_dirty) and results (mark_non_differentiable).",
        (r"\w+ is given something that is neither",),
    ),
    Code(
        "FG037", "backward returns a float as a gradient",
        "Gradients are tensors or None.",
        "Return torch.tensor(value), or None.",
        (r"backward returns an? ",),
    ),
    Code(
        "FG038", "it returns tensors that share memory, of which none shows all",
        "Several results are parts of one block of memory that neither a result nor the base of one has whole.",
        "Return the whole tensor beside its parts, or clones of the parts.",
        (r"it returns tensors that share memory",),
    ),
    Code(
        "FG039", "a tensor in a container that it returns requires grad, for which compile has pytree=True",
        "In a plain function autograd follows every tensor; in a Function its arguments and results alone.",
        "Pass tensors that require grad as arguments and return them one by one, or compile with pytree=True.",
        (r"a tensor in a container", r"a tensor from outside requires grad", r"it writes what requires grad"),
    ),
    # -------------------------------------------------------------- FG04x: calls within the method
    Code(
        "FG040", "it calls `Inner`, which declares is_traceable = False",
        "A nested Function or operator runs in eager, between compiled segments, or keeps the whole from being one.",
        "Make the nested call traceable; give an operator a fake implementation (torch.library.register_fake).",
        (r"it calls `[^`]*`,? (which|within)", r"calls `", r"is opaque: ", r"cannot be traced: ", r"has no fake"),
    ),
    Code(
        "FG041", "step is compiled code and writes to its arguments",
        "A function of an extension module cannot become one call in a graph.",
        "Register it as a torch.library operator that declares what it mutates, with a fake implementation.",
        (r".* is compiled code and", r"it calls compiled code"),
    ),
    Code(
        "FG042", "it calls `Inner.apply` by a name that was bound before, which this torch does not show",
        "From torch 2.14 on `apply` is written in C. Of a class without setup_context, a name that was bound before, "
        "`f = Inner.apply`, cannot be followed while the method is traced; Inner's own backward would be lost.",
        "Write `Inner.apply(...)` where it is called, give Inner a setup_context, or compile it, too.",
        (r"it calls `[^`]*\.apply` by a name",),
    ),
    # -------------------------------------------------------------- FG05x: limits
    Code(
        "FG043", "it writes to an expanded tensor, whose elements share memory",
        "Which of the values that are written to one place stays there is for the operation that writes them.",
        "Write to the tensor before it is expanded, or to a clone of it.",
        (r"it writes to an expanded tensor",),
    ),
    Code(
        "FG050", "it is traced for 64 combinations of constants and dtypes already",
        "A number (or string, or dtype) changes at every call, and each value is another graph.",
        "Pass a number that changes as a 0-d tensor.",
        (r"it is traced for",),
    ),
    Code(
        "FG051", "what its opaque nodes return keeps changing: beyond 8 graphs it falls back to eager",
        "What a nested call returns differs in dtype, rank or plain values each time.",
        "Have it return tensors of one kind.",
        (r"what its opaque nodes return", r"what it decides by"),
    ),
    Code(
        "FG052", "a graph of Norm_backward holds for one batch size; after 16 sizes its operations run one by one",
        "Under torch.func a shape of the method depends on the batch size in a way that fixes it.",
        "Keep x.shape[0] out of Python arithmetic in the method.",
        (r"a graph of .* holds for one batch size",),
    ),
    Code(
        "FG053", "what it saves depends on the sizes",
        "The method saves other tensors for other sizes, so that two traces of it do not fit together.",
        "Save the same tensors whatever the sizes.",
        (r"what it saves depends",),
    ),
    # -------------------------------------------------------------- FG06x: rules that cannot be derived
    Code(
        "FG054", "it writes to an argument that shares memory with another one",
        "Inside torch.compile and torch.export a call is an operator that only returns. This one breaks the graph, and "
        "runs between two graphs as it does outside.",
        "Return the new value instead of writing it, or leave the call out of the graph.",
        (r"it writes to an argument that", r"it returns a view of an argument that",
         r"it returns other containers",
         r"it calls what is opaque", r"it was traced for other sizes",
         r"a size depends on the data", r"this torch takes no guard", r"it has no backward$",
         r"torch.export takes no"),
    ),
    Code(
        "FG055", "it was traced for 16 numbers or objects, all else alike, for 4 closures, or for kinds with 2048 "
        "operations together: with another it falls back to eager until it was called with that one 256 times",
        "A number among the arguments, or of those that the methods read, takes many values; or a function, or the "
        "class itself, is made anew for every call. Each is a graph, which costs "
        "as much as some hundred calls (a loop counts by its turns); a value that is new has to come often first.",
        "Pass the number as a 0-d tensor, and one function; make the class once; or compile with fullgraph=True, "
        "which always traces.",
        (r"it was traced for \d+ numbers", r"it was traced for class after class"),
    ),
    Code(
        "FG056", "its traces failed, which took long: a further kind of call falls back to eager until that kind "
        "came 2, 4, 8, .. times, 256 at most",
        "A trace that fails costs as much as one that succeeds, and what was refused for one kind of call (a dtype, "
        "a layout, sizes) mostly is for the next: kinds are tried at growing intervals. None is given up.",
        "See why the traces failed: `explain` has the reason. compile with fullgraph=True tries always, and so does "
        "FUSEGRAD_DISABLE=patience.",
        (r"its traces failed, which took long",),
    ),
    Code(
        "FG057", "it writes to memory that two arguments, or two elements of one, share",
        "What a kernel has read of an argument is another's that was written meanwhile, or was written twice. Your own "
        "method runs for such calls; others are compiled.",
        "Pass a clone of the argument, or return the new value instead of writing it.",
        (r"it writes to memory that two",),
    ),
    Code(
        "FG060", "jvp is not linear: `mul` multiplies two values that depend on the tangents",
        "A rule is derived by transposing another, and only a linear one has a transpose.",
        "Write the missing method, or keep the operation off the way of the tangents or gradients.",
        (r"jvp is not linear", r"jvp cannot be transposed", r"`jvp`"),
    ),
    Code(
        "FG061", "the transpose of backward",
        "Not a problem: the method that you did not write is derived from one that you did.",
        "Nothing; write the method yourself to have another one.",
        (r"the transpose of", r"the derivative of forward", r"every method over a batch", r"forward is split for"),
    ),
    # -------------------------------------------------------------- FG07x: what the first call showed
    Code(
        "FG070", "value 0 differs in content between the traced graph and the method",
        "The first call is compared with your own method, bit for bit, and they differ: something was not seen.",
        "Look for randomness, global state or memory that is reused; please report it if there is none.",
        (r"value \d+ ", r"the traced graph returns"),
    ),
    Code(
        "FG071", "internal error: it is not made to start from what forward kept",
        "fusegrad made a mistake, told of it in a warning, and went round it: your own method ran, or what was "
        "traced of it, operation by operation.",
        "Please report the warning, with the file that it names. `config.debug` raises the error itself.",
        (r"internal error: ", r".*: internal error: "),
    ),
    Code(
        "FG072", "memory did not suffice: OutOfMemoryError: CUDA out of memory",
        "What was compiled found no memory where your own method did: this call ran in eager, the next may not.",
        "Free memory, or make the batch smaller.",
        (r"memory did not suffice",),
    ),
    # -------------------------------------------------------------- FG08x: everything else
    Code(
        "FG080", "RuntimeError: shape '[2, 3]' is invalid for input of size 4",
        "An operation of the method failed on stand-ins without data. Often the method fails in eager as well.",
        "Read the message; if the operation is right in eager, declare is_traceable = False and report it.",
        (r"\w*(Error|Exception|Warning|Interrupt|StopIteration|SymNode)\b",),
    ),
    Code(
        "FG081", "it saves an argument that it returns as it is",
        "torch refuses that of classes with setup_context, unless the result is marked as not differentiable, and it "
        "refuses it at the call. So that compiled calls raise where yours do, they run in eager.",
        "Return x.view_as(x) and save that, or x; or write forward(ctx, ...), where it is allowed.",
        (r"it saves an argument that it returns",),
    ),
    Code(
        "FG082", "`ctx.step` is a function that holds tensors",
        "A function, a module or another object on ctx has tensors of the call in it (in its closure, its attributes): "
        "no key can hold it, and no other call could use it.",
        "Save those tensors with ctx.save_for_backward, and make the function again in backward; or pass a module's "
        "parameters as arguments and call torch.func.functional_call.",
        (r"`ctx\.[^`]*` is an? \w+ that holds tensors", r"`ctx\.[^`]*` is an? [A-Z]\w* with tensors",
         r"`ctx\.[^`]*` holds an? (function|method|\w*Module|Linear)"),
    ),
    Code(
        "FG083", "it can reach more than 1000 functions",
        "What a method reads is looked for in all functions of its own package that it could call. There are too many "
        "of them, or one of the objects on the way cannot be looked at.",
        "Call what is needed by names that lead straight to it; keep registries of everything out of the method.",
        (r"it can reach more than", r"what it reads (cannot be followed|is more than)"),
    ),
    Code(
        "FG084", "what `ctx.meta` shares with the caller changed after forward",
        "ctx holds an argument (a dict, a list, an object) that was changed between forward and backward: the traced "
        "backward was made for what it was.",
        "Nothing, if that is meant: backward runs in eager then. Else keep a copy on ctx.",
        (r"what `ctx\.[^`]*` shares with",),
    ),
    # -------------------------------------------------------------- FG09x: many devices
    Code(
        "FG090", "it is given DTensors, and draws random numbers (`bernoulli`)",
        "No rule says how the ranks divide this method among them, so DTensor runs it operation by operation.",
        "Keep what the message names out of the method, or give it the parts (`x.to_local()`) where that is meant.",
        (r"it is given DTensors",),
    ),
    # -------------------------------------------------------------- FG1xx: compiled, with a launch more
    Code(
        "FG100", "no kernels, the traced ATen operations run one by one",
        "The traced graph cannot be written in fusegrad's primitives, so it is replayed operation by operation.",
        "The text behind it names the operation; keep it out, or put it into a Function of its own.",
        (r"no kernels", r".* runs operation by operation"),
    ),
    Code(
        "FG101", "an operation runs between the kernels: cannot generate code for sort",
        "One operation has no kernel; torch is called for it, and what is around it is fused.",
        "Nothing, or exchange it for operations that have kernels.",
        (r"an operation runs between the kernels", r"cannot generate code for"),
    ),
    Code(
        "FG102", "Softmax_forward runs with narrower blocks: OutOfResources: out of resource: shared memory",
        "The device refused to start the kernels, and started a version that needs less of what it lacks.",
        "Nothing; where the call matters, report device and versions: the schedule asked for too much.",
        (r".* runs with [a-z, ]+: ",),
    ),
    Code(
        "FG103", "Softmax_forward ran operation by operation: OutOfMemoryError: CUDA out of memory",
        "There was no memory for the kernels' results or workspace; this call went through torch, the next may not.",
        "Free memory, or make the batch smaller: a call through torch needs more memory and time.",
        (r".* ran operation by operation",),
    ),
    Code(
        "FG104", "`x`, a DTensor, is moved from S(1) to R: dim 1 cannot stay divided: `amax` reduces it by amax",
        "An operation of the method needs all of a dim, of which each rank had a part: it is gathered at every call.",
        "Redistribute it where that costs least, or divide another dim. With fullgraph=True this is an error.",
        (r"`.*`, a DTensor, is moved from",),
    ),
    Code(
        "FG105", "Softmax_forward goes through torch at some sizes: not proved to stay in its tensors",
        "Kernels run where each access is proved to stay inside its tensor, for all sizes or at those of the call. "
        "Of these kernels, at these sizes, it is neither.",
        "Please report it with the line that is named: the proof is too weak there, or the kernel wrong.",
        (r".* goes through torch at some sizes",),
    ),
    Code(
        "FG106", "a loop is traced step by step: its steps are not the same ones each time",
        "A loop over a size of an argument was not recognised as one: its graph holds all steps, for one length, and "
        "another length is traced anew.",
        "The text behind it says what is in the way: a number that is another one in each step, a list of all steps "
        "that is kept, a step that does something else than the others.",
        (r"a loop is traced step by step",),
    ),
    Code(
        "FG107", "its loop is at 40 steps not what it is at few",
        "An export's loop was recognised in short ones; compared with your method on made-up numbers, longer ones do "
        "something else, or the method does not take such numbers. No call of an export could tell.",
        "Let no step depend on its number or on the length in a way that short loops do not show (`if t == 1000`), and "
        "take arguments for which any numbers will do; or use the class through fusegrad, which compares at each call.",
        (r"its loop is at ", r"its loop cannot be compared"),
    ),
    Code(
        "FG108", "its operations run as they were traced, with eager's bits: backward makes `d` again and compares it "
        "with `far`, which forward hands over",
        "Kernels of forward and of backward add in two orders, and the largest of a row would be none of its elements.",
        "Save the index or the mask of the extreme in forward, and backward has nothing to compare.",
        (r"its operations run as they were traced",),
    ),
    Code(
        "FG110", "fusion break: a matmul is a library call",
        "Products whose arithmetic takes longer than their bytes go to cuBLAS or rocBLAS; what is before and behind "
        "becomes kernels of its own.",
        "Nothing, or tune on the GPU at hand: a fused product that is timed as faster is taken.",
        (r"a matmul",),
    ),
    Code(
        "FG111", "fusion break: `sort` has no kernel and is a library call",
        "The operation is not among those that kernels are generated for.",
        "Nothing, or exchange it for operations that have kernels.",
        (r"`[^`]*` has no kernel", r"`[^`]*` works on"),
    ),
    Code(
        "FG112", "fusion break: `Inner` runs in eager between the segments",
        "A nested call is opaque; no kernel may cross it.",
        "Make the nested call traceable.",
        (r"`[^`]*` runs in eager",),
    ),
    Code(
        "FG113", "fusion break: a scatter is whole only when its kernel has ended",
        "Other programs of the same kernel may still add to what is read.",
        "Nothing; read the scattered result in another way if you can.",
        (r"a scatter is whole",),
    ),
    Code(
        "FG114", "fusion break: a step in between needs the one and is needed by the other",
        "Joining the two would make a kernel wait for a call that waits for the kernel.",
        "Move the library call before or behind both.",
        (r"`[^`]*` is in between", r"a step in between"),
    ),
    Code(
        "FG115", "fusion break: one kernel would hold results of several calls for longer than it saves in moving",
        "Joining the two would keep results of several calls in memory at once.",
        "Nothing.",
        (r"one kernel would hold",),
    ),
    Code(
        "FG116", "fusion break: they share no value, or run over different spaces",
        "The two compute unrelated things, or over shapes of different size.",
        "Nothing.",
        (r"they share no value",),
    ),
    Code(
        "FG117", "fusion break: it needs the complete result of the one before (a grid-wide dependency)",
        "A value that is reduced over one axis is needed along another, or at very many places (slices of sums "
        "of slices), so all programs have to finish first.",
        "Nothing: the sum of a weight's gradient over all rows needs two passes.",
        (r"it needs the complete", r"its results are needed"),
    ),
    Code(
        "FG118", "fusion break: what comes before a matmul would be computed again for every tile of it",
        "A product in a kernel of its own reads its operands many times, so they are in memory first.",
        "Nothing.",
        (r"what comes before a matmul",),
    ),
    Code(
        "FG119", "fusion break: floats that are added to one place at once are added in no fixed order",
        "A kernel would add with atomics, no two runs with the same last bits; torch's own operation is called, "
        "which sorts first. Values that are put in one place are torch's under deterministic algorithms alone.",
        "Nothing.",
        (r"floats that are added", r"which of several values"),
    ),
    Code(
        "FG120", "a loop over time runs step by step: its steps are launches of their own",
        "A loop has a body that no single kernel can run yet; the kernels and calls of its body are launched for each "
        "step, compiled once for any number of steps.",
        "Nothing; where the steps are small, a loop over fewer and larger ones costs less.",
        (r"a loop over time runs step by step",),
    ),
    Code(
        "FG121", "fusion break: a region of matmuls is computed a slab of rows at a time, which bounds its memory",
        "The products of the region would hold more memory than `slab_bytes`: they are made for some rows at a time.",
        "A larger `slab_bytes`, where there is memory: fewer slabs read what they share less often.",
        (r"a region of matmuls is computed a slab",),
    ),
    Code(
        "FG122", "fusion break: a kernel for each direction in which a matrix that is never in memory is summed",
        "A program sums whole rows of it, or whole columns, and forms the tiles on its way; in one kernel, programs "
        "would share sums.",
        "Nothing: attention's gradients of queries and of keys are two kernels in every library.",
        (r"a kernel for each direction",),
    ),
    # -------------------------------------------------------------- FG2xx: errors, by class
    Code(
        "FG200", "RMSNorm.forward cannot be traced: it calls `print`",
        "fullgraph=True or is_traceable = True promises a trace, and it failed; or of what was traced no kernel may "
        "run. The reason has a code of its own.",
        "Keep the operation out of the method, or take the promise back.",
        ("NotTraceableError", "NotLaunchedError"),
    ),
    Code(
        "FG201", "fusegrad.compile(3): it is neither a Function class nor a function",
        "compile takes a torch.autograd.Function class or a plain function of tensors.",
        "Pass the class or the function itself.",
        ("CompileTargetError",),
    ),
    Code(
        "FG202", "Norm.is_traceable must be exactly a bool, not int",
        "A declaration has to be exactly what the contract says, so that a typo is not taken for False.",
        "Write True, False, or a dict of bools by method.",
        ("DeclarationError",),
    ),
    Code(
        "FG203", "there is no backend 'cuda'",
        "A setting that does not exist, or a value that it cannot have.",
        "Use one of the names that the message gives.",
        ("ConfigError", "DeriveJvpError", "LogsError"),
    ),
    Code(
        "FG204", "backend='triton' cannot run cpu tensors: Triton needs a GPU",
        "The backend that was asked for cannot run here.",
        "Use backend='auto'; `fusegrad doctor` says which backends work.",
        ("UnsupportedBackendError",),
    ),
    Code(
        "FG205", "f: autograd takes no keyword-only arguments, and scale are",
        "autograd hands arguments over by position.",
        "Take the `*` out of the parameters.",
        ("KeywordOnlyError",),
    ),
    Code(
        "FG206", "jvp(Clip): backward is not linear in its gradients: `clamp` is not linear",
        "Forward mode is the transpose of your backward, which has to be linear in the gradients.",
        "Write a jvp staticmethod, or compile(derive_jvp='forward').",
        ("NonLinearBackward", "NonLinearJvp", "NonLinearError"),
    ),
    Code(
        "FG207", "jvp(Norm): within two levels of forward mode a `jvp` has to be traced",
        "torch drops the outer tangent of what a jvp computes, so that it has to be traced; it calls a Function that "
        "cannot be, and of which torch would lose more.",
        "Keep jvp to torch operations, or take one of the derivatives in reverse mode.",
        ("NestedForwardMode",),
    ),
    Code(
        "FG208", "Outer: a nested call that runs in eager changed an argument in place",
        "An opaque body did something that it had not done when the method around it was traced.",
        "Declare is_traceable = False on the outer class.",
        ("OpaqueWriteError",),
    ),
    Code(
        "FG209", "Scale.backward: gradient[0]['w'] is a tensor, expected a tuple",
        "With pytree=True a container does not have the structure that it has to have.",
        "The message says where.",
        ("TreeError",),
    ),
    Code(
        "FG210", "explain(..., 'bf16(8)'): not a tensor specification",
        "An argument specification could not be read, or there are more or fewer arguments than `apply` takes.",
        'Write dtype[size,size,...], for example "bf16[8192,4096]".',
        ("SpecError", "SizeError", "ExplainedArgumentsError"),
    ),
    Code(
        "FG211", "explain(target='cuda:42'): there is no such target",
        "Kernels are generated for GPUs that are known by name.",
        "Use one of the names that the message gives.",
        ("UnknownTargetError", "UnknownDeviceError"),
    ),
    Code(
        "FG212", "Norm.forward has no graph: it calls `print`",
        "A graph was asked for of a method that runs in eager.",
        "Ask for a method that is compiled, or make this one traceable.",
        ("NothingCapturedError",),
    ),
    Code(
        "FG213", "check(Norm): compiled and eager differ",
        "A compiled class and the one you wrote differ; a script that shows it was written.",
        "Run the script. If the class is right, please report it with the script.",
        ("CheckError", "NothingComparedError", "DerivativeError"),
    ),
    Code(
        "FG214", "profile(Norm): there is no baseline 'jax'",
        "An argument of check or profile is not what it has to be.",
        "The message says what is possible.",
        ("CheckArgumentError", "ProfileArgumentError"),
    ),
    Code(
        "FG215", "export(Norm): an opaque node cannot be exported",
        "What was asked for cannot be written as a program without fusegrad.",
        "Use the class through fusegrad, or change what the message names.",
        ("ExportError", "ExportFormatError", "ProgramError"),
    ),
    Code(
        "FG216", "function NormBackward returned an incorrect number of gradients (expected 2, got 1)",
        "A method returned another number of tensors than autograd expects.",
        "Return one per argument (backward) or one per result (jvp).",
        ("TangentCountError", "GradientCountError", "GradientShapeError"),
    ),
    Code(
        "FG217", "vmap(Add): forward writes into `x`, which has no batch axis",
        "A batched value would have to be written into a tensor that has no batch.",
        "Batch that tensor too (in_dims), or write into a clone.",
        ("WrittenByEveryLane",),
    ),
    Code(
        "FG218", "demo: there is no Python source to train on",
        "The demonstration reads Python's own sources, and they are not there.",
        "Install Python with its standard library's sources.",
        ("NoTextError",),
    ),
    Code(
        "FG219", "batch: `aten.unique` gives other shapes for other data",
        "A rule that you did not write would need one of this operation, and there is none.",
        "Write backward, jvp or vmap yourself, or keep the operation out of the method.",
        ("NoRuleError",),
    ),
    Code(
        "FG220", "rms_norm.py:RMSnorm: cannot be imported: the module rms_norm has no 'RMSnorm'",
        "The class that a command was given cannot be found, or its module raises while it is imported.",
        "Write module:Class or file.py:Class; the message says what may have been meant.",
        ("TargetError",),
    ),
    Code(
        "FG221", "bench: the benchmarks are not in this installation",
        "A wheel holds the package and the demo alone; the benchmarks are part of the sources.",
        "Clone the repository and run `make bench` there.",
        ("BenchmarksMissing", "DemoMissing"),
    ),
    Code(
        "FG222", "Writes.apply cannot be in a graph of torch.compile: it calls what is opaque",
        "A call within torch.compile(fullgraph=True) or torch.export that cannot be an operator; the reason has a code "
        "of its own. Without fullgraph=True it breaks the graph and runs as ever.",
        "Take the reason away, or call it outside of that graph.",
        ("OuterGraphError",),
    ),
    Code(
        "FG223", "model.pt2: operator norm_forward_3f2a91c0d4: models:Norm is no longer what it was",
        "A program of torch.export calls an operator that cannot be written down, or that what is imported is not any "
        "more: another source, another global, another torch.",
        "Decorate the class in a module; load the program with the sources that it was saved with, or export it again.",
        ("SavedProgramError",),
    ),
    Code(
        "FG224", "Drops cannot be transformed within a graph: it draws random numbers",
        "torch.func meets a call that a graph holds, a program of torch.export say, for which no such rule can be "
        "derived. Backward, the plain one, is yours there as ever.",
        "Transform the call itself, outside of the graph.",
        ("OuterTransformError",),
    ),
    Code(
        "FG230", "bundle x.zip: manifest.json: it was altered: its seal does not fit",
        "A bundle is damaged, altered, of another version, or hostile; nothing of it was executed.",
        "Export the bundle again, or get it again from where it came.",
        ("BundleError",),
    ),
    Code(
        "FG231", "RMSNorm: x is torch.float64 with 2 axes; it was exported for f32 with 2",
        "The Function of a bundle is called with something that it was not exported for.",
        "Call it as it was exported, or export it for such arguments too.",
        ("BundleCallError",),
    ),
    Code(
        "FG240", "swap(LlamaForCausalLM): no module is exactly a LlamaRMSnorm, and no method of one names it",
        "A replacement matches nothing, or does not fit what it matches, or cannot be taken back; nothing was changed.",
        "Name what the model has; give a replacement that is called alike and reads the same parameters.",
        ("SwapError",),
    ),
    Code(
        "FG241", "RMSNorm.apply: `weight` is a plain tensor, and other arguments are DTensors",
        "A plain tensor may be a shard, or the same on every rank: which of both is not known.",
        "Make it a DTensor with distribute_tensor or DTensor.from_local, all on one mesh.",
        ("MixedTensorsError", "MeshesDifferError"),
    ),
    Code(
        "FG242", "Softmax.apply: `x` is S(1), but dim 1 of it cannot be divided: `amax` reduces it by amax",
        "With fullgraph=True nothing is gathered that was divided: the method needs all of that dim.",
        "Redistribute the argument before the call, or compile without fullgraph.",
        ("PlacementError", "NotDivisible"),
    ),
    Code(
        "FG243", "demo --nproc 2: a process failed",
        "torchrun, which starts the demonstration's processes, ended with an error; the message has its last lines.",
        "Run it with --nproc 1, and `fusegrad doctor`.",
        ("RanksFailedError",),
    ),
    Code(
        "FG244", "fusegrad does not work with torch 2.9.1: it is older than 2.11; it was tried with torch 2.13.0 ..",
        "The installed torch or triton is too old, or is untried and lacks a name that fusegrad needs.",
        "Install a version that the message names; a newer fusegrad may know a newer torch.",
        ("VersionError",),
    ),
    Code(
        "FG245", "Embedding_forward: embedding: an index is out of range",
        "An index that is data is negative, or not below the size of the dimension that it is for. On a GPU it is an "
        "assertion of the device, as in eager; Triton's interpreter raises this error.",
        "Keep indices in range. disable=\"index_checks\" leaves the check out: memory of others is read then.",
        ("IndexOutOfRangeError",),
    ),
    Code(
        "FG246", "the machine code of RMSNorm_forward is not read: this triton ships no nvdisasm",
        "A model of a launch counts instructions of NVIDIA machine code, which Triton's own disassembler lists.",
        "Install a triton whose wheel has nvdisasm; AMD's machine code is not read.",
        ("NoListingError",),
    ),
    Code(
        "FG247", "report/norm.html cannot be written: there is no folder report",
        "A file that a command was to write cannot be written there: no such folder, no permission, a full disk, or "
        "a suffix that is no format of that command.",
        "The message says what to do; `-o FILE` names another file.",
        ("OutputError",),
    ),
    # -------------------------------------------------------------- FG9xx: mistakes of fusegrad
    Code(
        "FG900", "internal: a state that cannot be",
        "A mistake of fusegrad. The command line writes a file that shows it again.",
        "Please report it with that file. is_traceable = False, or backend='reference', is a way around.",
        ("InternalError", "InvalidGraphError", "TypeRuleError", "ParseError", "LoweringError", "KernelCompileError",
         "KernelFaultError", "Unfusible", "CompiledCallError", "KeptDrawsError", "FusegradError",
         "CaptureError", "OpaqueCallError", "DataReadError"),
    ),
    Code(
        "FG901", "RMSNorm.forward: internal error: KeyError: u0 (please report it)",
        "fusegrad made a mistake in a call, and fullgraph=True or is_traceable = True keeps the method from running as "
        "written.",
        "Please report it, with the file that the message names. Without the promise the call works.",
        ("FaultError",),
    ),
)  # fmt: skip
"""In the order in which a reason is compared with them."""

BY_CODE = {row.code: row for row in CODES}
_BY_CLASS = {name: row.code for row in CODES if row.code >= "FG2" for name in row.words}
_PATTERNS = [(re.compile(word), row.code) for row in CODES if row.code < "FG2" for word in row.words]


@functools.lru_cache(maxsize=1024)
def code_of(reason: str | None) -> str | None:
    """The code of a reason, None for none: "it calls `print`" -> "FG020"."""
    if not reason:
        return None
    return next((code for pattern, code in _PATTERNS if pattern.match(reason)), "FG080")


def code_of_error(error: type) -> str:
    """The code of an error's class, or of the nearest one above it."""
    return next((_BY_CLASS[c.__name__] for c in error.__mro__ if c.__name__ in _BY_CLASS), "FG900")


def fix_of(reason: str | None) -> str | None:
    """The remedy for a reason."""
    code = code_of(reason)
    return BY_CODE[code].fix if code else None
