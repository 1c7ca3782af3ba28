"""The reference of C++ headers, from their declarations and comments.

A page has a line such as `<!-- header: MoE/Runtime/Artifact.h -->`. In its place comes what the
header says at its top, and every public declaration in it with its comment, for Sphinx's C++ domain.

This reads the headers of this tree, which clang-format has laid out, and not C++: namespaces,
classes, enums, functions, members and types, each behind a comment of `///`. What it cannot read
is an error of Sphinx, which parses each declaration again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from docstrings import join_spans, line_as_rst

INCLUDE = Path(__file__).resolve().parents[2] / "include"
MARK = re.compile(r"^<!-- header: (\S+) -->$", re.MULTILINE)

MACROS = re.compile(r'\bMOE_RUNTIME_EXPORT\s*|__attribute__\(\(visibility\("default"\)\)\)\s*')
SCOPE = re.compile(r"(class|struct|enum class|enum)\s+(\w+)")
BEHIND = re.compile(r"\s+///?\s+")  # code and what is said on its line
INITIALISERS = re.compile(r"\)\s*:\s(?!:).*$", re.DOTALL)  # of a constructor
# An option of a pass or of a pipeline; its help is its comment.
OPTION = re.compile(r'PassOptions::Option<.*?llvm::cl::desc\((?P<help>.*?)\)\s*,\s*llvm::cl::init', re.DOTALL)


@dataclass
class Entry:
    """A declaration: what the C++ domain calls its kind, its text, its comment, and its members."""

    kind: str
    declaration: str
    comment: list = field(default_factory=list)
    members: list = field(default_factory=list)
    namespace: str = ""


@dataclass
class Scope:
    """What a brace has opened. Entries of a hidden one are not shown."""

    kind: str  # namespace, class, struct, enum, enum class, or body
    entries: list
    namespace: str = ""
    is_hidden: bool = False


def top_comment(text):
    """The lines below the first one of the comment at the top of a file."""
    match = re.match(r"//===-.*\n//\n((?://.*\n)*?)//\n?//===-", text)
    return [line[2:].removeprefix(" ") for line in match[1].splitlines()] if match else []


def lines_of(text):
    """Lines without directives of the preprocessor and what only compilers of C skip."""
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"^#else\n.*?^#endif", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith("#")]


class Reader:
    """Reads declarations character by character; `text` is what has come of the current one."""

    def __init__(self):
        self.entries = []
        self.scopes = [Scope("namespace", self.entries)]
        self.comment, self.text, self.depth, self.last = [], "", 0, None
        self.in_string = False

    def read(self, text):
        for line in lines_of(text):
            code = line.strip()
            if code.startswith("///") and not self.text.strip():
                self.comment.append(code[3:].removeprefix(" "))
            elif not code and not self.text.strip():
                self.comment = []
            elif not code.startswith("//"):
                code, *said = BEHIND.split(code, maxsplit=1)
                self.last = None
                for character in code + "\n":
                    self.take(character)
                # Behind a member, on its line.
                if said and self.last and not self.last.comment:
                    self.last.comment = said
        return self.entries

    def take(self, character):
        scope = self.scopes[-1]
        if character == '"' and not self.text.endswith("\\"):
            self.in_string = not self.in_string
        if self.in_string or character == '"':
            self.text += character
            return
        if scope.kind == "body":
            if character == "{":
                self.scopes.append(Scope("body", [], is_hidden=True))
            elif character == "}":
                self.scopes.pop()
                self.text = ""
            return
        if character in "([" or (character == "{" and self.is_value()):
            self.depth += 1
        elif character in ")]" or (character == "}" and self.depth):
            self.depth -= 1
        elif not self.depth and self.end(scope, character):
            self.text = ""
            return
        self.text += character

    def is_value(self):
        """Whether a brace begins the value of a member, as in `int x[] = {1}` and `Option<bool> x{..}`."""
        return bool(self.depth or re.search(r"=\s*$|Option<[^()]*>\s+\w+$", self.text.strip()))

    def end(self, scope, character):
        """Whether the character ends what has been read; then that is an entry or a scope."""
        text = self.text.strip()
        if character == ":" and text in ("public", "private", "protected"):
            scope.is_hidden = text != "public"
        elif character == "{":
            self.open(scope, text)
        elif character == "}":
            self.close(scope, text)
        elif character == "," and scope.kind.startswith("enum"):
            self.add(scope, "enumerator", text)
        elif character == ";":
            if text and not SCOPE.fullmatch(text):  # not declared ahead
                self.add(scope, *classify(text))
            self.comment = []
        else:
            return False
        return True

    def open(self, scope, text):
        hidden = scope.is_hidden
        namespace = re.search(r"\bnamespace\s+([\w:]*)$", text)
        if namespace or text.startswith('extern "C"'):
            name = "::".join(filter(None, (scope.namespace, namespace[1] if namespace else "")))
            self.scopes.append(Scope("namespace", scope.entries, name, hidden))
        elif named := SCOPE.match(MACROS.sub("", text)):
            entry = self.add(scope, named[1].replace(" ", "-"), text[text.index(named[2]):])
            kind = named[1]
            self.scopes.append(Scope(kind, entry.members, "", hidden or kind == "class"))
            if hidden:
                return
            self.scopes[-1].is_hidden = kind == "class"
        else:
            self.add(scope, "function", text)
            self.scopes.append(Scope("body", [], is_hidden=True))
        self.comment = []

    def close(self, scope, text):
        if scope.kind.startswith("enum") and text:
            self.add(scope, "enumerator", text)
        self.scopes.pop()

    def add(self, scope, kind, text):
        option = OPTION.search(text)
        comment, self.comment = self.comment, []
        if option:
            said = "".join(re.findall(r'"([^"]*)"', option["help"]))
            comment = comment or ([said[0].upper() + said[1:] + "."] if said else [])
            text = text.partition("{")[0]
        text = re.sub(r"\s+", " ", INITIALISERS.sub(")", MACROS.sub("", text))).strip()
        for declaration in declarators(text) if kind == "member" else [text]:
            entry = Entry(kind, declaration, comment, namespace=scope.namespace)
            if not scope.is_hidden:
                scope.entries.append(entry)
                self.last = entry
        return entry


def declarators(text):
    """`T a` and `T b` of `T a, b`."""
    names = re.fullmatch(r"([^=]*?[>\w]) ((?:\w+, )+\w+)", text)
    return [f"{names[1]} {name}" for name in names[2].split(", ")] if names else [text]


def classify(text):
    """(kind in the C++ domain, declaration) of what ends with a semicolon."""
    if text.startswith("typedef "):
        return "type", text.removeprefix("typedef ")
    if text.startswith("using "):
        return "type", text.removeprefix("using ")
    plain = re.sub(r"=.*", "", text, flags=re.DOTALL) if "operator" not in text else text
    return ("function" if "(" in MACROS.sub("", plain).partition("{")[0] else "member"), text


# ------------------------------------------------------------------------ as pages


def comment_as_rst(lines):
    """Paragraphs, lists, and code, which is indented by two columns."""
    found, in_code = [], False
    for line in join_spans(lines):
        is_code = line.startswith("  ") and (in_code or not found or not found[-1].strip())
        if is_code and not in_code:
            found += ["", ".. code-block:: cpp", ""]
        in_code = is_code or (in_code and not line.strip())
        found.append(f"  {line}" if in_code and line.strip() else line_as_rst(line))
    return found


def entry_as_rst(entry):
    yield f".. cpp:{entry.kind}:: {entry.declaration}"
    yield ""
    for line in comment_as_rst(entry.comment):
        yield f"   {line}".rstrip()
    yield ""
    for member in entry.members:
        for line in entry_as_rst(member):
            yield f"   {line}".rstrip()


def read_header(name):
    text = (INCLUDE / name).read_text()
    return top_comment(text), Reader().read(text)


def replacement(match):
    comment, entries = read_header(match[1])
    lines, namespace = [*comment_as_rst(comment), ""], None
    for entry in entries:
        if entry.namespace != namespace:
            namespace = entry.namespace
            lines += [f".. cpp:namespace:: {namespace or 'NULL'}", ""]
        lines += entry_as_rst(entry)
    lines += [".. cpp:namespace:: NULL", ""]
    body = "\n".join(lines)
    return f"```cpp\n#include \"{match[1]}\"\n```\n\n````{{eval-rst}}\n{body}\n````"


def insert(app, docname, source):
    for name in MARK.findall(source[0]):
        app.env.note_dependency(str(INCLUDE / name))
    source[0] = MARK.sub(replacement, source[0])


def setup(app):
    app.connect("source-read", insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
