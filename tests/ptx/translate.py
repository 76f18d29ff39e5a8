#!/usr/bin/env python3
"""translate.py PTX C: turns PTX into C that runs on the grid of tests/sim.

Each kernel becomes a C function. A register becomes a variable of as many bits, whatever type the
instructions give it, a branch becomes a goto, and a barrier a call that lets the other lanes run.
ptx.h says what instructions do. One that is not known here is an error that names its line: nothing
is guessed. So is arithmetic without a rounding mode, which a driver may contract.
"""

import re
import sys

BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "b32": 32, "u32": 32,
        "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1}
SPECIAL = {"%tid.x": "threadIdx.x", "%ntid.x": "blockDim.x", "%ctaid.x": "blockIdx.x",
           "%nctaid.x": "gridDim.x"}
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
ORDERED = {"eq": "a == b", "ne": "a < b || a > b", "lt": "a < b", "le": "a <= b", "gt": "a > b",
           "ge": "a >= b", "num": "a == a && b == b"}
UNORDERED = {"equ": "!(a < b || a > b)", "neu": "a != b", "ltu": "!(a >= b)", "leu": "!(a > b)",
             "gtu": "!(a <= b)", "geu": "!(a < b)", "nan": "a != a || b != b"}
FROM_REAL = {("f16", "f32"), ("f32", "f16"), ("f32", "f64"), ("f64", "f32"), ("s32", "f32"),
             ("s64", "f64")}
WHOLE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<",
         "ls": "<=", "hi": ">", "hs": ">="}


class Unknown(Exception):
    pass


def c_type(bits):
    return "bool" if bits == 1 else f"uint{bits}_t"


def view(expression, kind):
    """The bits as what an instruction takes them for."""
    if kind[0] == "f":
        return f"as_{kind}({expression})"
    return f"(int{BITS[kind]}_t)({expression})" if kind[0] == "s" else f"({expression})"


def bits_of(expression, kind):
    return f"of_{kind}({expression})" if kind[0] == "f" else f"(uint{BITS[kind]}_t)({expression})"


class Kernel:
    """Translates one kernel, statement by statement, into `lines`."""

    def __init__(self, name):
        self.name = name
        self.registers = {}  # bits by name, without a number where there are several
        self.outer = []  # registers of the scopes around
        self.symbols = {}  # name: (space, offset)
        self.sizes = {"param": 0, "local": 0, "shared": 0}
        self.declared = []
        self.lines = []

    # ---- operands --------------------------------------------------------------------------------

    def room(self, space, text):
        """Declares a variable of a space, which begins where the one before it ends."""
        found = re.fullmatch(r"\.align (\d+) \.b8\s+([\w$]+)\[(\d+)\]", text)
        if not found:
            raise Unknown(text)
        align, name, size = int(found[1]), found[2], int(found[3])
        at = -(-self.sizes[space] // align) * align
        self.symbols[name] = (space, at)
        self.sizes[space] = at + size

    def register(self, text):
        bits = self.registers.get(text) or self.registers.get(text.rstrip("0123456789") + "<")
        if not bits:
            raise Unknown(f"operand {text}")
        return "R" + text.lstrip("%"), bits

    def value(self, text, kind, wider=False):
        """The operand as unsigned bits; registers that are `wider` than the type are cut."""
        bits = BITS[kind]
        if text in SPECIAL:
            return f"(uint{bits}_t){SPECIAL[text]}"
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", text):
            return f"(({c_type(bits)}){text}{'LL' if text[0] == '-' else 'ULL'})"
        for mark, digits in (("0f", 8), ("0d", 16)):
            if text.startswith(mark) and len(text) == 2 + digits and bits == 4 * digits:
                return f"0x{text[2:]}ULL" if bits == 64 else f"0x{text[2:]}U"
        if text in self.symbols:
            return f"{self.symbols[text][1]}ULL"
        name, have = self.register(text)
        if have != bits and not (wider and have > bits):
            raise Unknown(f"{text} has {have} bits, not {bits}")
        return name if have == bits else f"(uint{bits}_t){name}"

    def address(self, text, space):
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", text)
        if not found:
            raise Unknown(f"address {text}")
        if found[1] in self.symbols and self.symbols[found[1]][0] != space:
            raise Unknown(f"{found[1]} is not in {space}")
        return f"{self.value(found[1], 'u64')} + {found[2] or 0}LL"

    def target(self, text, kind, wider=False):
        name, have = self.register(text)
        if have != BITS[kind] and not (wider and have > BITS[kind]):
            raise Unknown(f"{text} has {have} bits, not {BITS[kind]}")
        return name

    def put(self, text):
        self.lines.append(text)

    # ---- instructions ----------------------------------------------------------------------------

    def access(self, op, parts, operands, line):
        """ld and st: the whole of a vector is aligned, and lies in its space."""
        space, kind = parts[0], parts[-1]
        count = {"v2": 2, "v4": 4}.get(parts[1], 1)
        if parts[1:-1] != ([f"v{count}"] if count > 1 else []):
            raise Unknown(".".join([op] + parts))
        place, registers = (operands[1], operands[0]) if op == "ld" else operands
        names = [name.strip() for name in registers.strip("{}").split(",")]
        if space not in ("param", "global", "shared", "local") or len(names) != count or (
                space == "param" and op == "st"):
            raise Unknown(".".join([op] + parts))
        size = BITS[kind] // 8
        write = "true" if op == "st" else "false"
        room = {"global": "at_global(%s, %d, %d)", "param": "at_param(params, %s, %d, %d, PARAMS)",
                "shared": f"at_shared(%s, %d, %d, {write})",
                "local": "at_local(local, %s, %d, %d, LOCALS)"}[space]
        where = room % (self.address(place, space), count * size, line)
        self.put(f"{{ unsigned char *at = {where};")
        for place, name in enumerate(names):
            at = f"at + {place * size}"
            if op == "ld":
                loaded = f"load{8 * size}({at})"
                loaded = view(loaded, kind) if kind[0] == "s" else loaded
                self.put(f"  {self.target(name, kind, wider=True)} = {loaded};")
            else:
                self.put(f"  store{8 * size}({at}, {self.value(name, kind, wider=True)});")
        self.put("}")

    def mov(self, kind, operands):
        out, value = operands
        if "{" not in out + value:
            self.put(f"{self.target(out, kind)} = {self.value(value, kind)};")
            return
        names = [name.strip() for name in (out if out[0] == "{" else value).strip("{}").split(",")]
        each = BITS[kind] // len(names)
        part = f"b{each}"
        if out[0] == "{":
            for place, name in enumerate(names):
                own = self.target(name, part)
                self.put(f"{own} = (uint{each}_t)({self.value(value, kind)} >> {place * each});")
        else:
            parts = [f"({c_type(BITS[kind])}){self.value(name, part)} << {place * each}"
                     for place, name in enumerate(names)]
            self.put(f"{self.target(out, kind)} = {' | '.join(parts)};")

    def convert(self, parts, operands):
        rounding, to, kind = parts[:-2], parts[-2], parts[-1]
        real_to, real_from = to[0] == "f", kind[0] == "f"
        value = self.value(operands[1], kind, wider=not real_from)
        out = self.target(operands[0], to, wider=not real_to)
        narrows = real_to and real_from and BITS[to] < BITS[kind]
        if rounding != (["rn"] if real_to and (narrows or not real_from) else
                        ["rzi"] if real_from and not real_to else []) or (
                            real_from and (to, kind) not in FROM_REAL):
            raise Unknown("cvt." + ".".join(parts))
        if real_from:
            self.put(f"{out} = {to}_of_{kind}({value});")
        elif real_to:
            self.put(f"{out} = of_{to}(({'float' if to == 'f32' else 'double'}){view(value, kind)});")
        else:  # cut to the narrower one, then widened as the source is, or as the target
            narrow = kind if BITS[kind] <= BITS[to] else to
            self.put(f"{out} = {view(f'(uint{BITS[narrow]}_t)({value})', narrow)};")

    def compare(self, parts, operands):
        how, kind = parts
        out = self.target(operands[0], "pred")
        a, b = (view(self.value(x, kind), kind) for x in operands[1:])
        if kind[0] == "f":
            test = {**ORDERED, **UNORDERED}[how]
            c = "float" if kind == "f32" else "double"
            self.put(f"{{ const {c} a = {a}, b = {b}; {out} = {test}; }}")
        else:
            self.put(f"{out} = {a} {WHOLE[how]} {b};")

    def shift(self, op, kind, operands, line):
        value, count = self.value(operands[1], kind), self.value(operands[2], "u32")
        bits, out = BITS[kind], self.target(operands[0], kind)
        if op == "shr" and kind[0] == "s":
            self.put(f"{out} = {view(value, kind)} >> ({count} < {bits} ? {count} : {bits - 1});")
        else:
            way = "<<" if op == "shl" else ">>"
            self.put(f"{out} = {count} < {bits} ? {value} {way} {count} : 0;")

    def multiply(self, op, parts, operands):
        how, kind = parts
        bits, name = BITS[kind], ".".join([op] + parts)
        a, b = (view(self.value(x, kind), kind) for x in operands[1:3])
        to = kind[0] + str(2 * bits) if how == "wide" else kind
        if how == "lo":
            product = f"(uint64_t)({a}) * (uint64_t)({b})"
        elif how == "wide" and bits < 64:
            product = f"(uint64_t)(int64_t)({a}) * (uint64_t)(int64_t)({b})"
        elif how == "hi" and bits == 32:
            product = f"({'int64_t' if kind[0] == 's' else 'uint64_t'})({a}) * ({b}) >> 32"
        else:
            raise Unknown(name)
        out = self.target(operands[0], to)
        more = f" + {self.value(operands[3], to)}" if op == "mad" else ""
        self.put(f"{out} = ({c_type(BITS[to])})({product}{more});")

    def real(self, op, parts, operands):
        """Arithmetic of f32 and f64: correctly rounded, or refused."""
        kind, rounding = parts[-1], parts[:-1]
        needs = [] if op in ("abs", "neg", "min", "max") else ["rn"]
        if rounding != needs:
            raise Unknown(".".join([op] + parts) + ", which is rounded by the driver's choice")
        args = [view(self.value(x, kind), kind) for x in operands[1:]]
        out = self.target(operands[0], kind)
        suffix = "f" if kind == "f32" else ""
        if op in INFIX:
            self.put(f"{out} = of_{kind}({args[0]} {INFIX[op]} {args[1]});")
        elif op in ("fma", "sqrt"):
            self.put(f"{out} = of_{kind}({op}{suffix}({', '.join(args)}));")
        elif op == "neg" or (op, kind) == ("abs", "f32"):
            self.put(f"{out} = {op}_{kind}({self.value(operands[1], kind)});")
        elif op in ("min", "max") and kind == "f32":
            self.put(f"{out} = {op}_{kind}({args[0]}, {args[1]});")
        else:
            raise Unknown(".".join([op] + parts))

    def whole(self, op, parts, operands, line):
        kind = parts[-1]
        if len(parts) != 1:
            raise Unknown(".".join([op] + parts))
        bits, out = BITS[kind], self.target(operands[0], kind)
        args = [self.value(x, kind) for x in operands[1:]]
        seen = [view(x, kind) for x in args]
        if op in ("add", "sub", "and", "or", "xor"):
            self.put(f"{out} = ({c_type(bits)})({args[0]} {INFIX[op]} {args[1]});")
        elif op == "div":
            self.put(f"{out} = (uint{bits}_t)div_{kind[0]}64({seen[0]}, {seen[1]}, {line});")
        elif op in ("min", "max"):
            sign = "<" if op == "min" else ">"
            self.put(f"{out} = {seen[0]} {sign} {seen[1]} ? {args[0]} : {args[1]};")
        elif op == "neg":
            self.put(f"{out} = ({c_type(bits)})(0 - {args[0]});")
        elif op == "not":
            self.put(f"{out} = ({c_type(bits)}){'!' if bits == 1 else '~'}{args[0]};")
        else:
            raise Unknown(".".join([op] + parts))

    def instruction(self, text, line):
        guard = ""
        if text[0] == "@":
            condition, text = text.split(None, 1)
            name = self.value(condition.lstrip("@!"), "pred")
            guard = f"if ({'!' if '!' in condition else ''}{name}) "
        opcode, _, rest = text.partition(" ")
        op, *parts = opcode.split(".")
        operands = [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", rest)]
        operands = [x for x in operands if x]
        self.put(f"{guard}{{ /* {line} */")
        kind = parts[-1] if parts else ""
        if op == "bra" and parts in ([], ["uni"]):
            self.put(f"goto {operands[0].lstrip('$')};")
        elif opcode == "ret":
            self.put("return;")
        elif opcode == "bar.sync" and operands == ["0"]:
            self.put(f"barrier({line});")
        elif op in ("ld", "st") and len(parts) > 1 and len(operands) == 2:
            self.access(op, parts, operands, line)
        elif op == "mov" and len(parts) == 1:
            self.mov(kind, operands)
        elif opcode == "cvta.to.global.u64":
            self.put(f"{self.target(operands[0], 'u64')} = {self.value(operands[1], 'u64')};")
        elif op == "cvt":
            self.convert(parts, operands)
        elif op == "selp":
            a, b = self.value(operands[1], kind), self.value(operands[2], kind)
            choice = self.value(operands[3], "pred")
            self.put(f"{self.target(operands[0], kind)} = {choice} ? {a} : {b};")
        elif op == "setp" and len(parts) == 2 and len(operands) == 3:
            self.compare(parts, operands)
        elif op in ("shl", "shr") and len(parts) == 1:
            self.shift(op, kind, operands, line)
        elif opcode == "prmt.b32":
            a, b, c = (self.value(x, "b32") for x in operands[1:])
            self.put(f"{self.target(operands[0], 'b32')} = permute({a}, {b}, {c});")
        elif kind in ("f32", "f64"):
            self.real(op, parts, operands)
        elif op in ("mul", "mad") and len(parts) == 2:
            self.multiply(op, parts, operands)
        elif kind in BITS:
            self.whole(op, parts, operands, line)
        else:
            raise Unknown(opcode)
        self.put("}")

    def statement(self, text, line):
        if text.startswith(".reg"):
            kind, names = text.split()[1:]
            name, count = re.fullmatch(r"([%\w]+)(?:<(\d+)>)?", names).groups()
            bits = BITS[kind[1:]]
            self.registers[name + ("<" if count else "")] = bits
            for number in range(1, int(count)) if count else [""]:
                own = f"{c_type(bits)} R{name.lstrip('%')}{number} = ({c_type(bits)})JUNK;"
                (self.lines if self.outer else self.declared).append(own)
        elif text.startswith((".local", ".shared")):
            space, rest = text.split(None, 1)
            self.room(space[1:], rest)
        elif text.startswith(".pragma"):
            pass  # how far loops are unrolled, and which bytes of a vector are used
        else:
            self.instruction(text, line)

    def scope(self, opens):
        """False: the last one is closed."""
        if opens:
            self.outer.append(dict(self.registers))
        elif not self.outer:
            return False
        else:
            self.registers = self.outer.pop()
        self.put("{" if opens else "}")
        return True

    def text(self):
        return "\n".join([
            f"static void {self.name}(const unsigned char *params)", "{",
            f"enum {{ PARAMS = {self.sizes['param']}, LOCALS = {self.sizes['local']} }};",
            "_Alignas(16) unsigned char local[LOCALS + 1];",
            "memset(local, JUNK & 0xff, sizeof local);"] + self.declared + self.lines + ["}\n"])


class Reader:
    """Takes PTX line by line: kernels, and a message for each line that cannot be translated."""

    def __init__(self):
        self.kernels, self.wrong = [], []
        self.own = None  # the kernel
        self.inside = False  # its body
        self.begun, self.start = "", 0  # of a statement: its text so far, and its line

    def outside(self, text):
        found = re.match(r"\.visible \.entry (\w+)\(", text)
        if found:
            self.own = Kernel(found[1])
            self.kernels.append(self.own)
        elif self.own is None and not re.match(r"\.(version|target|address_size)\b", text):
            raise Unknown(text)
        elif text.startswith(".param"):
            self.own.room("param", text[len(".param "):].rstrip(","))
        self.inside = text == "{"

    def body(self, text, number):
        while text:
            label = re.match(r"\$?(\w+:)\s*", text)
            if not self.begun and text[0] in "{}":
                self.inside = self.own.scope(text[0] == "{")
                self.own = self.own if self.inside else None
                text = text[1:].strip()
            elif not self.begun and label:
                self.own.put(label[1] + ";")
                text = text[label.end():]
            else:
                self.start = self.start if self.begun else number
                part, ends, text = text.partition(";")
                self.begun = f"{self.begun} {part}".strip()
                text = text.strip()
                if ends:
                    whole, self.begun = re.sub(r"\s+", " ", self.begun), ""
                    self.own.statement(whole, self.start)

    def line(self, text, number):
        text = re.sub(r"//.*", "", text).replace("\t", " ").strip()
        try:
            if self.inside:
                self.body(text, number)
            elif text:
                self.outside(text)
        except (Unknown, KeyError, ValueError, IndexError, AttributeError) as error:
            self.wrong.append(f"{number}: {text}: {error}")
            self.begun = ""


def main():
    source, out = sys.argv[1:]
    with open(source, encoding="ascii") as file:
        reader = Reader()
        for number, text in enumerate(file, 1):
            reader.line(text, number)
    kernels, wrong = reader.kernels, reader.wrong
    for message in wrong[:10]:
        print(f"{source}:{message}", file=sys.stderr)
    if wrong or not kernels:
        sys.exit(f"{source}: {len(kernels)} kernels, {len(wrong)} lines that are not understood")
    with open(out, "w", encoding="ascii") as file:
        shared = max(kernel.sizes["shared"] for kernel in kernels)
        file.write(f"#define PTX_SHARED {shared + 1}\n#include \"ptx.h\"\n\n")
        file.write("\n".join(kernel.text() for kernel in kernels))
        file.write("\nconst ptx_kernel ptx_kernels[] = {\n")
        for kernel in kernels:
            file.write(f"    {{\"{kernel.name}\", {kernel.name}, {kernel.sizes['param']}}},\n")
        file.write("    {0}};\n")


if __name__ == "__main__":
    main()
