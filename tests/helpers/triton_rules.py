"""Rules for Triton sources, checked on their syntax trees.

Integer width: a value is 64-bit if it was cast to int64, or computed from such a value; a name is
if all its assignments are, a parameter if every call passes one. A product of a run-time value and
a stride must be 64-bit: 1,079,839 rows of 2,048 columns are more than 2^31 elements.
"""

import ast
import re
from collections.abc import Iterator, Mapping

# What a row or an entry of a table is multiplied by to get an offset.
PITCH = re.compile(r"stride|pitch|line|^(D|E|F|H|J|K|N|W_COLS|W_ROWS)$|^num_(rows|columns|ids)$")
# 0, 1, a step of a loop over columns, or a number of tokens: their choices fit 32-bit tables.
SMALL = {"half", "second", "step", "num_tokens"}

Functions = Mapping[str, ast.FunctionDef]


def jit_functions(trees: Mapping[str, ast.Module]) -> dict[str, ast.FunctionDef]:
    """Every `@triton.jit` function by name."""
    return {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
    }


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


class Widths:
    """Which names of which function are 64-bit; greatest fixed point over all sources."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        called = {
            node.func.id
            for function in functions.values()
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        self.wide = {}
        for name, function in functions.items():
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            arguments = {one.arg for one in parameters(function)}
            self.wide[name] = dict.fromkeys(names - arguments, True)
            self.wide[name] |= dict.fromkeys(arguments, name in called)
        while self._step():
            pass

    def of(self, node: ast.expr, function: str) -> bool:
        """Whether an expression inside a function is 64-bit."""
        match node:
            case ast.Name(id=name):
                return self.wide[function].get(name, False)
            case ast.BinOp(left=left, right=right):
                return self.of(left, function) or self.of(right, function)
            case ast.UnaryOp(operand=value) | ast.Subscript(value=value):
                return self.of(value, function)
            case ast.IfExp(body=body, orelse=other):
                return self.of(body, function) and self.of(other, function)
            case ast.Call():
                return self._of_call(node, function)
        return False

    def _of_call(self, node: ast.Call, function: str) -> bool:
        text = ast.unparse(node.func)
        if text.endswith(".to") or text == "tl.cast":
            return "int64" in ast.unparse(node.args[-1])
        if text in ("tl.zeros", "tl.full"):
            return "int64" in ast.unparse(node)
        if text in ("tl.where", "tl.maximum", "tl.minimum", "min", "max"):
            return any(self.of(one, function) for one in node.args[text == "tl.where" :])
        return text in self.functions and self._returned(text) == [True]

    def _returned(self, name: str) -> list[bool]:
        """64-bit or not, of each value that a function returns."""
        returns = [n.value for n in ast.walk(self.functions[name]) if isinstance(n, ast.Return)]
        rows = [self._values(value, name) for value in returns if value is not None]
        longest = max((len(row) for row in rows), default=0)
        # Variants that return fewer values are chosen by constants; each place counts where it is.
        return [all(row[i] for row in rows if i < len(row)) for i in range(longest)]

    def _values(self, value: ast.expr, function: str) -> list[bool]:
        """64-bit or not, of each part of a tuple or of what a call returns."""
        if isinstance(value, ast.Tuple):
            return [self.of(one, function) for one in value.elts]
        if isinstance(value, ast.Call) and ast.unparse(value.func) in self.functions:
            return self._returned(ast.unparse(value.func))
        return [self.of(value, function)]

    def _step(self) -> bool:
        before = {name: dict(names) for name, names in self.wide.items()}
        for name, function in self.functions.items():
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    self._assign(node.targets[0], node.value, name)
                elif isinstance(node, ast.AnnAssign) and node.value is not None:
                    self._assign(node.target, node.value, name)
                elif isinstance(node, (ast.For, ast.comprehension)):
                    self._assign(node.target, ast.Constant(0), name)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    self._pass(node, name)
        return self.wide != before

    def _assign(self, target: ast.expr, value: ast.expr, function: str) -> None:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        widths = [self.of(value, function)] * len(targets)
        if isinstance(target, ast.Tuple):
            widths = self._values(value, function) + [False] * len(targets)
        for one, width in zip(targets, widths, strict=False):
            if isinstance(one, ast.Name):
                self.wide[function][one.id] &= width

    def _pass(self, call: ast.Call, function: str) -> None:
        callee = call.func.id if isinstance(call.func, ast.Name) else ""
        if callee not in self.functions:
            return
        names = [one.arg for one in parameters(self.functions[callee])]
        given = [*zip(names, call.args, strict=False)]
        given += [(one.arg, one.value) for one in call.keywords if one.arg]
        for name, value in given:
            self.wide[callee][name] &= self.of(value, function)


def constants(function: ast.FunctionDef) -> set[str]:
    """Names that are known when the kernel is compiled."""
    marked = [(one.arg, one.annotation) for one in parameters(function)]
    marked += [
        (node.target.id, node.annotation)
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return {name for name, mark in marked if mark is not None and "constexpr" in ast.unparse(mark)}


def names_in(node: ast.AST) -> set[str]:
    """Names in an expression, but not in the address of what it loads."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
        return {"a loaded value"}
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*(names_in(child) for child in ast.iter_child_nodes(node))) - {"tl"}


def narrow_products(functions: Functions) -> Iterator[str]:
    """Products of a run-time value and a stride in 32 bits."""
    widths = Widths(functions)
    for name, function in functions.items():
        known = constants(function) | SMALL
        for node in ast.walk(function):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
                pair = (ast.Name(getattr(node.target, "id", ""), ast.Load()), node.value)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                pair = (node.left, node.right)
            else:
                continue
            if any(widths.of(side, name) for side in pair):
                continue
            for value, pitch in (pair, pair[::-1]):
                moves = {
                    n for n in names_in(value) - known if not n.isupper() and not PITCH.search(n)
                } or "program_id" in ast.unparse(value)
                if moves and any(PITCH.search(n) for n in names_in(pitch)):
                    yield f"{name}: {ast.unparse(node)} is a 32-bit product; cast to int64 first"


def _calls(functions: Functions, ending: str) -> Iterator[tuple[str, ast.Call]]:
    for name, function in functions.items():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == ending:
                yield name, node


def inexact_dots(functions: Functions) -> Iterator[str]:
    """Dots that may round fp32 operands to TF32, which is the default on a GPU."""
    for name, call in _calls(functions, "dot"):
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        if given.get("input_precision") != "'ieee'":
            yield f"{name}: {ast.unparse(call)} needs input_precision='ieee'"


def chained_dots(functions: Functions) -> Iterator[str]:
    """Two dots into one accumulator in one loop body: wrong results on sm_100."""
    for name, function in functions.items():
        for loop in ast.walk(function):
            if not isinstance(loop, (ast.For, ast.While)):
                continue
            targets = [
                ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                for node in ast.walk(loop)
                if isinstance(node, (ast.Assign, ast.AugAssign)) and "tl.dot(" in ast.unparse(node)
            ]
            for target in {one for one in targets if targets.count(one) > 1}:
                yield f"{name}: two dots into {target} in one loop"


FORBIDDEN = {
    "autotune": "needs a driver, and results would depend on timings; add a row to configs.py",
    "make_block_ptr": "gone in Triton 3.9",
    "advance": "gone in Triton 3.9",
    "item": "waits for the device",
    "tolist": "waits for the device",
    "cpu": "waits for the device",
    "numpy": "waits for the device",
    "synchronize": "waits for the device",
    "nonzero": "waits for the device",
    "environ": "wrappers read no environment",
    "getenv": "wrappers read no environment",
}


def forbidden_names(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Functions and options that no file may use."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
                yield f"{file}: {ast.unparse(node)}: {FORBIDDEN[node.attr]}"
            elif isinstance(node, ast.keyword):
                value = ast.unparse(node.value)
                if node.arg == "warp_specialize" and value != "False":
                    yield f"{file}: warp_specialize={value}: fails in Triton 3.7 to 3.9"
                elif node.arg == "num_ctas" and value != "1":
                    yield f"{file}: num_ctas={value}: fails in Triton 3.6 to 3.9"


def violations(sources: Mapping[str, str]) -> list[str]:
    """All violations in some Triton sources, file name -> text."""
    trees = {file: ast.parse(text) for file, text in sources.items()}
    functions = jit_functions(trees)
    found = [*forbidden_names(trees), *narrow_products(functions)]
    return found + [*inexact_dots(functions), *chained_dots(functions)]
