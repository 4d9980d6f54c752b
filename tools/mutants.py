# SPDX-License-Identifier: MIT
"""mutants.py - the small faults that tools/mutate puts into the library, found by parsing it.

A mutant is named FILE:FUNCTION:OPERATOR:NUMBER; the number counts those of the same operator in the
same function. The operators:

  compare    < and <=, > and >=, == and != are exchanged
  condition  a condition of && or ||, or the only one of an if, is dropped
  statement  an assignment, a call, a return, break, continue or goto is dropped; not free
  swap       the operands of - / % are exchanged
  assign     an operator with assignment becomes a plain assignment
  +1, -1     an integer is one more, one less
  enum       a constant becomes the next one of its enum

All mutants of a run are compiled at once. Each is an expression that asks MUTANT(n), and does what
the source says unless n is chosen when the program starts: texts are only inserted, so that mutants
may stand inside of each other, and a line keeps its number.

The list of faults also names lines whose mutants change nothing that could be seen.
"""
import bisect
import re

FOLDERS = 'src/|backends/|fsdp'
TOKEN = re.compile(r'''(?P<skip>\s+|//[^\n]*|/\*.*?\*/
             |(?:(?<=\n)|^)[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)  # a line of the preprocessor
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|[<>=!+\-*/%&|^]=|&&|\|\||::|.)''', re.S | re.X)
LEVELS = ['= += -= *= /= %= &= |= ^= <<= >>=', '? :', '||', '&&', '|', '^', '&', '== !=',
          '< <= > >=', '<< >>', '+ -', '* / %']
LEVEL = {mark: i for i, marks in enumerate(LEVELS) for mark in marks.split()}
COMPARE = {'<': '<=', '<=': '<', '>': '>=', '>=': '>', '==': '!=', '!=': '=='}
ASSIGN = {'+=', '-=', '*=', '/=', '&=', '|=', '^='}
MOST_LISTED = 80
FREES = {'free', 'fsdpi_free'}  # that host memory leaks only sanitizers see
JUMPS = {'return', 'break', 'continue', 'goto'}
BLOCKS = {'if', 'for', 'while', 'switch', 'do', 'else', 'case', 'default', 'try', 'catch'}
TYPES = {'const', 'static', 'struct', 'enum', 'union', 'unsigned', 'signed', 'int', 'char', 'short',
         'long', 'float', 'double', 'void', 'volatile', 'register', 'auto', 'typedef', 'using',
         'extern'}
CLOSERS = {'(': ')', '[': ']', '{': '}'}

HEADER = '''/* What each file of a mutated library is compiled with. In the environment of a program
   MUTANT wakes one, and MUTANT_MAP names a file that gets a 1 for each that is reached. No header
   is included: the programs choose what these declare. */
#ifndef MUTANTS_H
#define MUTANTS_H
#ifdef __cplusplus
extern "C" {
#endif
char *mutants_getenv(const char *name) __asm__("getenv");
int mutants_atoi(const char *text) __asm__("atoi");
int mutants_open(const char *path, int flags, ...) __asm__("open");
int mutants_close(int fd) __asm__("close");
void *mutants_mmap(void *at, __SIZE_TYPE__ size, int access, int flags, int fd, long offset)
    __asm__("mmap");
#ifdef __cplusplus
}
#endif
static int mutants_chosen = -1;
static unsigned char *mutants_map;
__attribute__((constructor)) static void mutants_begin(void) {
    const char *chosen = mutants_getenv("MUTANT"), *map = mutants_getenv("MUTANT_MAP");
    if (chosen) mutants_chosen = mutants_atoi(chosen);
    if (map) {
        int fd = mutants_open(map, 2);
        void *at = fd < 0 ? (void *)-1 : mutants_mmap(0, MUTANTS, 3, 1, fd, 0);
        if (at != (void *)-1) mutants_map = (unsigned char *)at;
        if (fd >= 0) mutants_close(fd);
    }
}
__attribute__((unused)) static inline int mutants_is(int n) {
    if (mutants_map) mutants_map[n] = 1;
    return n == mutants_chosen;
}
#define MUTANT(n) mutants_is(n)
#define MUTANT_OP(n, is, was, a, b) (MUTANT(n) ? (a is b) : (a was b))
#define MUTANT_SWAP(n, op, a, b) (MUTANT(n) ? (b op a) : (a op b))
#endif
'''


class Mutant:
    """Texts before and behind [first, last) of a file, and one in place of a part of it: `middle`
    is (from, to, text). A @ is the number of the mutant."""

    def __init__(self, function, operator, what, first, last, before, behind='', middle=None):
        self.function, self.operator, self.what = function, operator, what
        self.first, self.last, self.middle = first, last, middle
        self.before, self.behind = before, behind
        self.file = self.name = self.line = self.first_line = self.last_line = None
        self.programs = []  # whose tests run first


class Source:
    """The tokens of a file, its brackets and its functions."""

    def __init__(self, name, text):
        self.name, self.text = name, text
        self.tokens = []  # (kind, text, position)
        for m in TOKEN.finditer(text):
            if m.lastgroup != 'skip':
                self.tokens.append((m.lastgroup, m.group(), m.start()))
        self.at = [t[1] if t[0] != 'text' else '""' for t in self.tokens]
        self.lines = [0] + [m.end() for m in re.finditer('\n', text)]
        self.pair, opened = {}, []
        for i, t in enumerate(self.at):
            if t in CLOSERS:
                opened.append(i)
            elif t in (')', ']', '}') and opened:
                j = opened.pop()
                self.pair[i], self.pair[j] = j, i

    def line_of(self, position):
        return bisect.bisect_right(self.lines, position)

    def start(self, i):
        return self.tokens[i][2]

    def end(self, i):
        return self.tokens[i][2] + len(self.tokens[i][1])

    def functions(self):
        """(name, token of its {, of its }) of each function."""
        i = 0
        while i < len(self.at):
            if self.at[i] == '{' and i and self.at[i - 1] in (')', 'const', 'override', 'noexcept'):
                yield self.name_before(i), i, self.pair.get(i, i)
                i = self.pair.get(i, i)
            i += 1

    def name_before(self, i):
        """Of the function whose { this is: before its parameters, attributes and initialisers."""
        name = ''
        while i > 0 and self.at[i] not in (';', '}'):
            i = self.pair.get(i, i) if self.at[i] in (')', ']') else i
            if self.at[i] == '(' and self.tokens[i - 1][0] == 'name' and \
                    not re.match('__|FSDP_[A-Z_]+$', self.at[i - 1]):
                name = self.at[i - 1]
                if self.at[i - 2] not in (',', ':'):
                    break
            i -= 1
        return name

    def is_binary(self, i):
        """clang-format has blanks on both sides of a binary operator, and of no other."""
        before, after = self.start(i) - 1, self.end(i)
        return self.text[before].isspace() and self.text[after].isspace() and \
            (self.tokens[i - 1][0] != 'mark' or self.at[i - 1] in (')', ']', '}'))

    def operand(self, i, step, level):
        """The last token of the operand of i on one side; operators below `level` end it."""
        j = i + step
        while True:
            t = self.at[j]
            if t in (';', ',', 'return', 'case', 'else', 'do') or LEVEL.get(t, 99) < level and \
                    (t in '?:' or self.is_binary(j)):
                break
            if t in CLOSERS if step < 0 else t in (')', ']', '}'):
                break
            if t in ('{', '}') and not self.is_literal(j):
                break
            if t == ')' and self.at[self.pair.get(j, 1) - 1] in BLOCKS:
                break
            j = self.pair.get(j, j) + step if t in ('(', ')', '[', ']', '{', '}') else j + step
            if not 0 <= j < len(self.at):
                break
        return j - step

    def is_literal(self, i):
        """Is this brace one of (type){...}?"""
        i = i if self.at[i] == '{' else self.pair.get(i, i)
        return self.at[i - 1] == ')' and self.at[self.pair.get(i - 1, 0) - 1] not in BLOCKS

    def between(self, a, b):
        """Text of the tokens [a, b] for a reader, shortened."""
        text = ' '.join(self.text[self.start(a):self.end(b)].split())
        return text if len(text) < 60 else text[:57] + '...'


def enums_of(sources):
    """The next constant of each constant's enum; those of a function are its own."""
    following = {}
    for s in sources:
        inside = {i for _, first, last in s.functions() for i in range(first, last)}
        for i, t in enumerate(s.at):
            j = i + 1 + (t == 'enum' and i + 1 < len(s.at) and s.tokens[i + 1][0] == 'name')
            if t != 'enum' or j >= len(s.at) or s.at[j] != '{' or i in inside:
                continue
            names = [s.at[k] for k in range(j + 1, s.pair[j])
                     if s.at[k - 1] in ('{', ',') and s.at[k + 1] in ('=', ',', '}')]
            if len(names) > 1:
                following.update(zip(names, names[1:] + names[:1]))
    return following


def statement_starts(s, first, last):
    """The tokens with which a statement of a body begins, and with which it ends."""
    i = first + 1
    is_value = is_label = False  # the last } ended braces of values; the last : a label
    while i < last:
        before, end = s.at[i - 1], i
        begins = before in (';', '{', 'else', 'do') or before == '}' and not is_value or \
            before == ':' and is_label or \
            before == ')' and s.at[s.pair[i - 1] - 1] in ('if', 'for', 'while', 'switch')
        is_label = s.at[i] in ('case', 'default') or is_label and before != ':'
        is_value = s.at[i] == '{' and not begins
        if s.at[i] in ('(', '[') or is_value:
            end = s.pair[i]
        elif begins and s.at[i] not in BLOCKS and s.at[i] not in ('{', '}', ';'):
            stop = i
            while s.at[stop] != ';' and stop < last:
                stop = s.pair[stop] + 1 if s.at[stop] in CLOSERS else stop + 1
            yield i, stop
            if s.at[i] in ('static', 'enum', 'typedef'):
                end = stop
        i = end + 1


def fixed(s, first, last):
    """Places in a body where the language wants a constant."""
    for i, stop in statement_starts(s, first, last):
        if s.at[i] in ('static', 'enum', 'typedef'):
            yield s.start(i), s.start(stop)
        elif is_declaration(s, i):
            for j in range(i, stop):
                if s.at[j] == '[' and ('=' not in s.at[i:j] or s.at[s.pair[j] + 1] == '='):
                    yield s.start(j), s.start(s.pair[j])
    for i in range(first, last):
        if s.at[i] == 'case':
            yield s.start(i), s.start(s.at.index(':', i))
        elif re.match('U?INT[0-9]+_C$', s.at[i]):
            yield s.start(i), s.start(s.pair[i + 1])


def is_declaration(s, i):
    t, next_kind = s.at[i], s.tokens[i + 1][0]
    if t in JUMPS or s.tokens[i][0] != 'name':
        return False
    star = i + 1
    while s.at[star] in ('*', '&', '::', '<'):
        star += 1
    return t in TYPES or next_kind == 'name' or \
        star > i + 1 and (s.at[i + 1] in ('::', '<') or not s.text[s.end(star - 1)].isspace())


def statements(s, name, first, last):
    for i, stop in statement_starts(s, first, last):
        if is_declaration(s, i) or s.at[i + 1] == ':':
            continue
        words = s.at[i:stop]
        is_note = words[:3] == ['(', 'void', ')'] and '(' not in words[3:]  # something is not used
        is_element = not ({'(', '=', '++', '--'} | ASSIGN | JUMPS) & set(words)  # of a list
        is_end = words[0] == 'return' and (s.at[stop + 1] == 'else' or
                                           all(t == '}' for t in s.at[stop + 1:last]))
        if is_note or is_element or is_end or words[0] in FREES:
            continue
        yield Mutant(name, 'statement', f'without {s.between(i, stop)}', s.start(i), s.end(stop),
                     'if (MUTANT(@)); else ')


def conditions(s, name, first, last):
    seen = set()
    for i in range(first, last):
        found = []
        if s.at[i] in ('&&', '||') and s.is_binary(i):
            level = LEVEL[s.at[i]] + 1
            found = [(s.operand(i, -1, level), i - 1), (i + 1, s.operand(i, 1, level))]
        elif s.at[i] == 'if' and s.at[i + 1] == '(':
            a, b = i + 2, s.pair[i + 1] - 1
            if not any(t in ('&&', '||') for t in s.at[a:b + 1]):
                found = [(a, b)]
        before = '(!MUTANT(@) && (' if s.at[i] == '||' else '(MUTANT(@) || ('
        for a, b in found:
            if (a, b) not in seen and a <= b:
                seen.add((a, b))
                yield Mutant(name, 'condition', f'without the condition {s.between(a, b)}',
                             s.start(a), s.end(b), before, '))')


def operators(s, name, first, last):
    for i in range(first, last):
        t = s.at[i]
        if t not in LEVEL or s.tokens[i][0] != 'mark' or not s.is_binary(i):
            continue
        level, kind = LEVEL[t], None
        if t in COMPARE:
            kind, is_now = 'compare', COMPARE[t]
        elif t in ASSIGN:
            kind, is_now = 'assign', '='
        elif t in ('-', '/', '%'):
            kind, is_now = 'swap', None
        if not kind:
            continue
        a, b = s.operand(i, -1, level + (t in ASSIGN)), s.operand(i, 1, level + (t not in ASSIGN))
        if a >= i or b <= i:
            continue
        begin = f'MUTANT_OP(@, {is_now}, {t}, (' if is_now else f'MUTANT_SWAP(@, {t}, ('
        what = f'{s.between(a, b)}, with {is_now}' if is_now else f'{s.between(a, b)}, swapped'
        yield Mutant(name, kind, what, s.start(a), s.end(b), begin, '))',
                     (s.start(i), s.end(i), '), ('))


def constants(s, name, first, last, following):
    for i in range(first, last):
        t, kind = s.at[i], s.tokens[i][0]
        place, near = (s.start(i), s.end(i)), s.between(i - 1, i + 1)
        if kind == 'number' and re.fullmatch(r'\d+[uUlL]*', t):
            yield Mutant(name, '+1', f'{near}, {t} + 1', *place, '(', ' + MUTANT(@))')
            if int(t.rstrip('uUlL')):
                yield Mutant(name, '-1', f'{near}, {t} - 1', *place, '(', ' - MUTANT(@))')
        elif t in following and s.at[i - 1] not in ('.', '->') and s.at[i + 1] != '(':
            yield Mutant(name, 'enum', f'{following[t]} in place of {t}', *place,
                         f'(MUTANT(@) ? {following[t]} : ', ')')


def bodies_of(sources):
    """The body of each function, by its name: its source, and its first and last position."""
    bodies = {}
    for s in sources:
        for name, first, last in s.functions():
            bodies.setdefault(name, []).append((s, s.start(first) + 1, s.start(last)))
    return bodies


def equivalent(sources, text):
    """Operators that change nothing, by source and line, and what is wrong with the list. An entry
    is 'equivalent FUNCTION [OPERATOR...]', then '= text', which stands in this function once."""
    bodies, found, wrong = bodies_of(sources), {}, []
    for function, operators, old in re.findall(r'(?m)^equivalent (\S+)(.*)\n= (.*)$', text):
        where = [(s, s.text.index(old, at)) for s, at, end in bodies.get(function, [])
                 if s.text[at:end].count(old) == 1]
        if len(where) != 1:
            wrong.append(f'equivalent: {old} is in {function} {len(where)} times')
        for s, at in where:
            found[s.name, s.line_of(at)] = set(operators.split()) or {'*'}
    return found, wrong


def of_list(sources, text):
    """The mutants of a list of faults that no operator makes, and what is wrong with it. An entry
    is 'ID FUNCTION [PROGRAM]', the program whose tests run first, then lines '- text', which stand
    in this function once, and '+ text', what comes in their place. The function begins with its
    other body, so that the mutant is like all others."""
    bodies, found, wrong = bodies_of(sources), [], []
    for entry in re.findall(r'(?m)^[^#\s+-].*\n(?:[+-].*\n)+', text):
        head, *lines = entry.rstrip('\n').split('\n')
        name, function, *programs = head.split()
        old, new = ('\n'.join(line[2:] for line in lines if line[0] == sign) for sign in '-+')
        where = [(s, at, s.text[at:end]) for s, at, end in bodies.get(function, [])
                 if old and old in s.text[at:end]]
        times = sum(body.count(old) for _, _, body in where)
        if times != 1:
            wrong.append(f'{name}: its text is in {function} {times} times')
            continue
        s, at, body = where[0]
        if re.search(r'(?m)^[ \t]*#', body):
            wrong.append(f'{name}: {function} has lines of the preprocessor')
            continue
        other = ' '.join(t[1] for t in Source(s.name, body.replace(old, new)).tokens)
        end = ' return;' if re.search(rf'\bvoid {function}\(', s.text) else ''
        m = Mutant(function, 'listed', f'{" ".join(new.split()) or "nothing"} in place of '
                   f'{" ".join(old.split())}', at, at, f' if (MUTANT(@)) {{ {other}{end} }}')
        m.file, m.name, m.line = s.name, name, s.line_of(at + body.index(old))
        m.first_line = m.last_line = s.line_of(at)
        m.programs = programs
        found.append(m)
    if len(found) > MOST_LISTED:
        wrong.append(f'{len(found)} listed faults: at most {MOST_LISTED}')
    return found, wrong


def header(count):
    """The text of mutants.h for so many mutants."""
    return HEADER.replace('MUTANTS,', f'{max(count, 1)},')


def sources_of(texts):
    """Of these files: a dict from names to texts."""
    return [Source(name, text) for name, text in sorted(texts.items())]


def generated(sources, equal):
    """All mutants that the operators make, but for those of these lines: see `equivalent`."""
    following, found = enums_of(sources), []
    for s in sources:
        count = {}
        for name, first, last in s.functions():
            constant = list(fixed(s, first, last))
            of = list(constants(s, name, first, last, following))
            for make in (statements, conditions, operators):
                of += make(s, name, first, last)
            of = [m for m in of if not any(a <= m.first < b for a, b in constant)]
            for m in sorted(of, key=lambda m: (m.first, m.last)):
                key = (m.function, m.operator)
                count[key] = count.get(key, 0) + 1
                m.file, m.name = s.name, f'{s.name}:{name}:{m.operator}:{count[key]}'
                m.line = s.line_of(m.middle[0] if m.middle else m.first)
                m.first_line, m.last_line = s.line_of(m.first), s.line_of(m.last)
                if not equal.get((s.name, m.line), set()) & {'*', m.operator}:
                    found.append(m)
    return found


def mutated(text, mutants):
    """The text with (number, mutant) of it, each asleep."""
    pieces = []  # (position, order at this position, length, text)
    for n, m in mutants:
        size, inner = m.last - m.first, m.middle is not None  # of two at one place
        pieces.append((m.first, (1, -size, inner, n), 0, m.before.replace('@', str(n))))
        pieces.append((m.last, (0, size, not inner, -n), 0, m.behind.replace('@', str(n))))
        if inner:
            pieces.append((m.middle[0], (2, 0, 0, n), m.middle[1] - m.middle[0], m.middle[2]))
    out, at = [], 0
    for position, _, length, new in sorted(pieces):
        out += [text[at:position], new]
        at = position + length
    return ''.join(out) + text[at:]
