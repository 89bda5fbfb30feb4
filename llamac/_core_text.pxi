# The tokenizer's part of the core for Python: vocabularies, byte pair encoding, added tokens (csrc/vocab.h).

cdef object ids_of(const uint32_t *ids, size_t n):
    cdef size_t i
    return [ids[i] for i in range(n)]


def string_tables(list texts not None):
    """Return the ends of strings as u32 and the strings as UTF-8, one after another (csrc/vocab.h)."""
    cdef size_t count = len(texts), i, total = 0
    cdef Py_ssize_t n
    cdef const char *text
    for i in range(count):
        PyUnicode_AsUTF8AndSize(texts[i], &n)
        total += n
    if total > 0xFFFFFFFF:
        raise ArgumentError(f"the strings have {total} bytes")
    cdef bytearray ends = bytearray(4 * count), strings = bytearray(total)
    cdef uint32_t *end = <uint32_t *><char *>ends
    cdef char *out = <char *>strings
    total = 0
    for i in range(count):
        text = PyUnicode_AsUTF8AndSize(texts[i], &n)
        memcpy(out + total, text, n)
        total += n
        end[i] = <uint32_t>total
    return bytes(ends), bytes(strings)


def read_strings(bytes data not None, size_t at, size_t count):
    """Read strings that follow their lengths (u64), until `count` are read or the data ends.

    Returns the strings, where the last one ends, which can be after the data, and why it is not UTF-8 or None.
    """
    cdef size_t available = len(data)
    cdef const unsigned char *start = data
    cdef uint64_t length
    cdef list texts = []
    while count:
        if at > available or available - at < 8:
            return texts, at + 8, None
        memcpy(&length, start + at, 8)
        if length > available - at - 8:
            return texts, at + 8 + <object>length, None
        try:
            texts.append(PyUnicode_DecodeUTF8(<const char *>start + at + 8, length, NULL))
        except UnicodeDecodeError as error:
            return texts, at + 8 + length, error.reason
        at += 8 + length
        count -= 1
    return texts, at, None


@cython.final
cdef class Vocabulary:
    """The strings of tokens and the merges, over tables in `data`, which is checked.

    From byte `at` on: the ends of the strings (u32), the merges (3 x u32), the strings (UTF-8).
    """

    cdef vocab _c
    cdef bytes _data
    cdef bint _is_open

    def __init__(self, bytes data not None, size_t at, size_t n_tokens, size_t n_merges, size_t text_bytes):
        cdef llamac_error err
        if self._is_open:
            raise LlamacError("a Vocabulary is opened once")
        cdef size_t left = len(data)
        for size in (at, 4 * n_tokens, 12 * n_merges, text_bytes):
            if size > left:
                raise ModelError(f"the tables need {size} bytes, but the data ends after {left}")
            left -= size
        if at % 4:
            raise ArgumentError(f"at is {at}, expected a multiple of 4")
        self._data = data
        cdef const unsigned char *start = <const unsigned char *>data + at
        cdef const unsigned char *merges = start + 4 * n_tokens
        cdef int result
        with nogil:
            result = vocab_open(&self._c, <const uint32_t *>start, n_tokens, <const uint32_t *>merges, n_merges,
                                merges + 12 * n_merges, text_bytes, &err)
        check(result, &err)
        self._is_open = True

    def __dealloc__(self):
        vocab_close(&self._c)

    cpdef index(self):
        """Build the index of merges, if it does not exist yet."""
        cdef llamac_error err
        if self._c.pairs is NULL:
            check(vocab_index(&self._c, &err), &err)

    def __len__(self):
        return self._c.n_tokens

    @property
    def n_strings(self):
        """The number of tokens, without ids that have no token."""
        cdef uint32_t token, n, found = 0
        for token in range(self._c.n_tokens):
            vocab_text(&self._c, token, &n)
            found += n > 0
        return found

    @property
    def n_merges(self):
        return self._c.n_merges

    @property
    def longest(self):
        """The number of characters of the longest string."""
        return self._c.longest

    cdef object _text(self, uint32_t token):
        cdef uint32_t n
        cdef const unsigned char *text = vocab_text(&self._c, token, &n)
        return text[:n].decode() if n else None

    def text(self, token):
        """Return the string of a token, or None if no token has this id."""
        if not 0 <= token < self._c.n_tokens:
            return None
        return self._text(token)

    def texts(self):
        """Return the strings of all tokens, None for an id without a token."""
        cdef uint32_t token
        return [self._text(token) for token in range(self._c.n_tokens)]

    def merges(self):
        """Return the merges as pairs of strings, the best first."""
        cdef size_t i
        texts = self.texts()
        return [[texts[self._c.merges[3 * i]], texts[self._c.merges[3 * i + 1]]] for i in range(self._c.n_merges)]

    def find(self, str text not None):
        """Return the id of the token with this string, or None."""
        cdef Py_ssize_t n
        cdef const char *data = PyUnicode_AsUTF8AndSize(text, &n)
        cdef uint32_t token = vocab_find(&self._c, <const unsigned char *>data, n)
        return None if token == VOCAB_NONE else token

    def rank(self, str left not None, str right not None):
        """Return the rank of the merge of two strings, or None."""
        first, second = self.find(left), self.find(right)
        if first is None or second is None:
            return None
        self.index()
        cdef uint32_t rank = vocab_rank(&self._c, first, second)
        return None if rank == VOCAB_NONE else rank

    def merge_roles(self, uint32_t token):
        """Return whether a token is the result of a merge, and whether it is a half of one."""
        self.index()
        if token >= self._c.n_tokens:
            return False, False
        cdef unsigned char roles = self._c.roles[token]
        return bool(roles & VOCAB_FORMED), bool(roles & VOCAB_JOINED)

    def rank_merges(self, const float[::1] scores not None, const unsigned char[::1] forms not None, size_t max_rivals,
                    uint32_t part=0, uint32_t n_parts=1):
        """Derive a part of the merges from scores (merge_ranks). Returns them as bytes, and rivals as triples of ids.

        Raises UnsupportedError if the vocabulary needs a closer look.
        """
        cdef llamac_error err
        cdef size_t n_rivals = 0, i
        cdef long n
        if scores.shape[0] != self._c.n_tokens or forms.shape[0] != self._c.n_tokens or not self._c.n_tokens:
            raise ArgumentError("there is not one score for each token")
        if part >= n_parts:
            raise ArgumentError(f"part is {part}, expected less than {n_parts}")
        n = merge_ranks(&self._c, &scores[0], &forms[0], part, n_parts, NULL, NULL, 0, &n_rivals, &err)
        cdef long bound = check_count(n, &err)
        cdef uint32_t *merges = NULL
        cdef merge_rival *rivals = NULL
        try:
            merges = <uint32_t *>allocate_raw(12 * <size_t>bound, "merges")
            rivals = <merge_rival *>allocate_raw(sizeof(merge_rival) * max_rivals, "rivals of merges")
            with nogil:
                n = merge_ranks(&self._c, &scores[0], &forms[0], part, n_parts, merges, rivals, max_rivals, &n_rivals,
                                &err)
            check_count(n, &err)
            return ((<const unsigned char *>merges)[:12 * n],
                    [(rivals[i].x, rivals[i].y, rivals[i].z) for i in range(n_rivals)])
        finally:
            mem_free(merges)
            mem_free(rivals)

    def parse_merges(self, list lines not None):
        """Convert merges that are written as "left right" to bytes. Returns None if one is not a merge of tokens."""
        cdef Py_ssize_t n, cut
        cdef const char *line
        cdef unsigned char joined[4096]
        cdef uint32_t left, right
        cdef size_t count = len(lines), i
        cdef bytearray result = bytearray(12 * count)
        cdef unsigned char[::1] view = result
        cdef uint32_t *out = <uint32_t *>&view[0] if count else NULL
        for i in range(count):
            line = PyUnicode_AsUTF8AndSize(lines[i], &n)
            if n == 0 or n > 4096:
                return None
            cut = utf8_bytes(<unsigned char>line[0])
            while cut < n and line[cut] != b" ":
                cut += 1
            if cut >= n:
                return None
            memcpy(joined, line, cut)
            memcpy(joined + cut, line + cut + 1, n - cut - 1)
            left = vocab_find(&self._c, joined, cut)
            right = vocab_find(&self._c, joined + cut, n - cut - 1)
            out[3 * i], out[3 * i + 1] = left, right
            out[3 * i + 2] = vocab_find(&self._c, joined, n - 1)
            if left == VOCAB_NONE or right == VOCAB_NONE or out[3 * i + 2] == VOCAB_NONE:
                return None
        return bytes(result)


cdef long check_count(long result, llamac_error *err) except -1:
    if result < 0:
        check(-1, err)
    return result


@cython.final
cdef class Bpe:
    """Encodes words with the merges of a vocabulary."""

    cdef bpe _c
    cdef Vocabulary _vocabulary
    cdef bytes _hidden

    def __init__(self, Vocabulary vocabulary not None, *, bint byte_level, bint byte_fallback, bint ignore_merges,
                 bint fuse_unknown, unknown=None, bytes hidden=None):
        cdef llamac_error err
        vocabulary.index()
        self._vocabulary, self._hidden = vocabulary, hidden
        self._c.vocab = &vocabulary._c
        self._c.byte_level, self._c.byte_fallback = byte_level, byte_fallback
        self._c.ignore_merges, self._c.fuse_unknown = ignore_merges, fuse_unknown
        self._c.unknown = VOCAB_NONE if unknown is None else unknown
        self._c.hidden = NULL
        if unknown is not None and unknown >= len(vocabulary):
            raise ArgumentError("the unknown token is not in the vocabulary")
        if hidden is not None:
            if len(hidden) != len(vocabulary):
                raise ArgumentError("there is not one flag for each token")
            self._c.hidden = <const unsigned char *>hidden
        check(bpe_open(&self._c, &err), &err)

    def encode(self, list words not None):
        """Encode words one by one and return the ids of their tokens."""
        cdef size_t n_words = len(words), i, n = 0, n_ids = 0
        cdef Py_ssize_t size
        cdef int result = -1
        cdef llamac_error err
        cdef const char *word
        for i in range(n_words):
            PyUnicode_AsUTF8AndSize(words[i], &size)
            n += size
        cdef size_t *ends = NULL
        cdef unsigned char *text = NULL
        cdef uint32_t *ids = NULL
        try:
            ends = <size_t *>allocate_raw(sizeof(size_t) * n_words, "the ends of words")
            text = <unsigned char *>allocate_raw(n, "the words of a text")
            ids = <uint32_t *>allocate_raw(sizeof(uint32_t) * n, "the tokens of a text")
            n = 0
            for i in range(n_words):
                word = PyUnicode_AsUTF8AndSize(words[i], &size)
                memcpy(text + n, word, size)
                n += size
                ends[i] = n
            with nogil:
                result = bpe_encode(&self._c, text, ends, n_words, ids, &n_ids, &err)
            check(result, &err)
            return ids_of(ids, n_ids)
        finally:
            mem_free(ends)
            mem_free(text)
            mem_free(ids)


@cython.final
cdef class AddedTokens:
    """Finds added tokens in text. `names` are sorted and distinct; `flags` has a byte for each."""

    cdef added_tokens _c
    cdef bytes _text, _flags, _ends

    def __init__(self, list names not None, bytes flags not None):
        cdef llamac_error err
        cdef uint32_t end = 0
        if self._text is not None:
            raise LlamacError("AddedTokens are opened once")
        if len(flags) != len(names):
            raise ArgumentError("there is not one flag for each name")
        cdef bytearray ends = bytearray()
        for name in names:
            end += len(name)
            ends += end.to_bytes(4, "little")
        self._text, self._flags, self._ends = b"".join(names), flags, bytes(ends)
        self._c.n = len(names)
        self._c.ends = <const uint32_t *><const unsigned char *>self._ends
        self._c.flags = <const unsigned char *>self._flags
        self._c.text = <const unsigned char *>self._text
        check(added_open(&self._c, &err), &err)

    def __dealloc__(self):
        added_close(&self._c)

    def split(self, str text not None, bint skip_special):
        """Split a text at added tokens: (part, index of the token's name or -1, start and end in bytes)."""
        cdef Py_ssize_t n
        cdef const unsigned char *data = <const unsigned char *>PyUnicode_AsUTF8AndSize(text, &n)
        cdef added_search search
        cdef added_match match
        cdef size_t done = 0
        cdef int found
        memset(&search, 0, sizeof(search))
        parts = []
        while True:
            with nogil:
                found = added_next(&self._c, data, n, skip_special, &search, &match)
            if not found:
                break
            if done < match.start:
                parts.append((data[done:match.start].decode(), -1, done, match.start))
            parts.append((data[match.start:match.end].decode(), match.index, match.start, match.end))
            done = match.end
        if done == 0:
            return [(text, -1, 0, n)] if n else []
        if done < <size_t>n:
            parts.append((data[done:n].decode(), -1, done, n))
        return parts
