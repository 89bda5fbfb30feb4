# Sampling, included by _core.pyx: the settings of draws, what a draw follows, and draws from rows of logits.

cdef size_t SCRATCH = LLAMAC_DRAW_SCRATCH   # bytes per logit


@cython.final
cdef class Sampling:
    """Checked settings of a draw (llamac_sampling, llamac_adjustments)."""

    cdef llamac_sampling _c
    cdef llamac_adjustments _adjustments
    cdef bint _adjusts                     # whether draws with a History adjust logits
    cdef const int32_t[::1] _bias_ids
    cdef const float[::1] _bias
    cdef bytes _breakers

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uint64_t seed=0, *,
                 uint32_t candidate=0, float typical_p=0,
                 float xtc_probability=0, float xtc_threshold=0, float mirostat_tau=0, float mirostat_eta=0):
        cdef llamac_error err
        temperature = to_float(temperature, "temperature")
        self._c = llamac_sampling(<float>temperature, as_int(top_k, "top_k"), <float>to_float(top_p, "top_p"),
                                  <float>to_float(min_p, "min_p"), seed, candidate, typical_p, xtc_probability,
                                  xtc_threshold, mirostat_tau, mirostat_eta)
        if temperature > 0 and self._c.temperature == 0:
            raise ArgumentError(f"temperature {temperature} is too small: use 0 for the most probable token")
        check(llamac_sampling_check(&self._c, &err), &err)

    def adjust(self, *, const int32_t[::1] bias_ids=None, const float[::1] bias=None, float repetition_penalty=1,
               float presence_penalty=0, float frequency_penalty=0, float dry_multiplier=0, float dry_base=1,
               int dry_allowed_length=1, bytes dry_breakers=None):
        """Adjust the logits before draws that have a History.

        Args:
            dry_breakers: A bit per token.
        """
        cdef llamac_error err
        cdef llamac_adjustments *a = &self._adjustments
        a.repetition_penalty = repetition_penalty
        a.presence_penalty, a.frequency_penalty = presence_penalty, frequency_penalty
        a.dry_multiplier, a.dry_base, a.dry_allowed_length = dry_multiplier, dry_base, dry_allowed_length
        if bias_ids is not None and bias is not None and bias_ids.shape[0]:
            if bias.shape[0] != bias_ids.shape[0]:
                raise ArgumentError("each biased token needs a bias")
            self._bias_ids, self._bias = bias_ids, bias
            a.bias_ids, a.bias, a.n_bias = &bias_ids[0], &bias[0], <int>bias.shape[0]
        self._breakers = dry_breakers
        a.dry_breakers = NULL if dry_breakers is None else <const uint8_t *><const char *>dry_breakers
        check(llamac_adjustments_check(a, &err), &err)
        self._adjusts = True


@cython.final
cdef class History:
    """The tokens that a draw follows, those that must not come next (llamac_history), and mirostat's state."""

    cdef public double mu
    cdef llamac_history _c
    cdef int32_t *_ids
    cdef int _capacity
    cdef const int32_t[::1] _banned
    cdef const uint8_t[::1] _allowed

    def __init__(self, const int32_t[::1] prompt not None):
        self._c.n_ids = 0
        for i in range(prompt.shape[0]):
            self.append(prompt[i])
        self._c.n_prompt = self._c.n_ids

    def __dealloc__(self):
        mem_free(self._ids)

    def copy(self):
        """A history with the same tokens and bans, which follows other tokens from here on."""
        cdef History other = History.__new__(History)
        if self._capacity:
            other._ids = more_ids(NULL, 0, self._capacity)
            memcpy(other._ids, self._ids, <size_t>self._c.n_ids * sizeof(int32_t))
        other._c, other._capacity, other.mu = self._c, self._capacity, self.mu
        other._c.ids = other._ids
        if self._c.banned is not NULL:
            other._banned = self._banned
        if self._c.allowed is not NULL:
            other._allowed = self._allowed
        return other

    def append(self, int32_t token):
        """Add a generated token."""
        cdef int capacity = max(64, 2 * self._capacity)
        if self._c.n_ids == self._capacity:
            self._ids = more_ids(self._ids, self._capacity, capacity)
            self._c.ids, self._capacity = self._ids, capacity
        self._ids[self._c.n_ids] = token
        self._c.n_ids += 1

    def ban(self, const int32_t[::1] banned not None):
        """Set the tokens that must not come next. The buffer is used until the next call."""
        self._banned = banned
        self._c.n_banned = <int>banned.shape[0]
        self._c.banned = &banned[0] if banned.shape[0] else NULL

    def allow(self, const uint8_t[::1] mask):
        """Set a bit for each token that may come next, the lowest of a byte first; None allows all.

        The buffer is used until the next call.
        """
        if mask is not None and mask.shape[0] == 0:
            raise ArgumentError("the mask of allowed tokens is empty")
        self._allowed = mask
        self._c.allowed = NULL if mask is None else &mask[0]
        self._c.n_allowed = 0 if mask is None else <int>min(8 * mask.shape[0], INT_MAX)


cdef int draw_prepare(llamac_draw *d, Sampling sampling, History history, uint64_t position,
                      bint adjusted=False) except -1:
    """Describe a draw. Its objects must live until it has been computed."""
    d.sampling, d.position = &sampling._c, position
    d.adjustments, d.history, d.mu = NULL, NULL, NULL
    if history is not None:
        d.mu = &history.mu
        if sampling._adjusts and not adjusted:
            d.adjustments, d.history = &sampling._adjustments, &history._c
    return 0


cdef void draw_token(llamac_draw *d, const float *logits, int n, void *scratch) noexcept nogil:
    """Draw from a row of n logits, which are not changed."""
    d.logits = logits
    llamac_draw_rows(d, 1, n, 1, scratch)


cdef object draw_result(llamac_draw *d):
    """The token that was drawn."""
    if d.token < 0 and d.err.code == LLAMAC_BAD_MODEL and d.adjustments is not NULL:
        raise ArgumentError(f"{d.err.message.decode()}, after the bias, penalties and bans of the request")
    return check(d.token, &d.err)


cdef object draw_outcome(llamac_draw *d):
    """The token that was drawn, or the error."""
    try:
        return draw_result(d)
    except LlamacError as failure:
        return failure


def sample(const float[::1] logits not None, Sampling sampling not None, uint64_t position, History history=None, *,
           bint adjusted=False):
    """Draw a token id from logits (n). adjusted: `adjust_logits` has adjusted them."""
    cdef llamac_draw draw
    cdef int n = <int>logits.shape[0]
    if n == 0:
        raise ArgumentError("there are no logits to sample from")
    cdef bytearray scratch = bytearray(<size_t>n * SCRATCH)
    cdef char *c_scratch = scratch
    draw_prepare(&draw, sampling, history, position, adjusted)
    with nogil:
        draw_token(&draw, &logits[0], n, c_scratch)
    return draw_result(&draw)


def adjust_logits(float[::1] logits not None, Sampling sampling not None, History history not None):
    """Adjust logits (n) in place, as draws do before they filter."""
    cdef int n = <int>logits.shape[0]
    cdef bytearray scratch = bytearray(<size_t>n * LLAMAC_SAMPLE_SCRATCH)
    cdef char *c_scratch = scratch
    if n and sampling._adjusts:
        with nogil:
            llamac_adjust_logits(&logits[0], n, &sampling._adjustments, &history._c, c_scratch)


cdef list row_logprobs(const float *logits, int n, int token, int top):
    """(id, log probability) of a token, then of the `top` most probable ones."""
    cdef llamac_error err
    cdef int found, i
    if top < 0:
        raise ArgumentError(f"logprobs is {top}, expected at least 0")
    cdef llamac_logprob *out = NULL
    cdef void *scratch = NULL
    try:
        out = <llamac_logprob *>allocate(<size_t>top + 1, sizeof(llamac_logprob), "log probabilities")
        scratch = allocate_raw(<size_t>n * LLAMAC_SAMPLE_SCRATCH, "ranking tokens")
        with nogil:
            found = llamac_logprobs(logits, n, token, top, out, scratch, &err)
        check(found, &err)
        return [(out[i].id, out[i].logprob) for i in range(found + 1)]
    finally:
        mem_free(out)
        mem_free(scratch)


def logprobs(const float[::1] logits not None, int n, int token, int top):
    """(id, log probability) of a token, then of the `top` most probable ones, from the first n logits of a row."""
    if not 1 <= n <= logits.shape[0]:
        raise ArgumentError(f"there are {logits.shape[0]} logits, expected at least {n}")
    return row_logprobs(&logits[0], n, token, top)


def sample_rows(const float[:, ::1] logits not None, int n, list samplings not None, list positions not None,
                list histories=None, int threads=1, list rows=None):
    """Draw a token id from the first n logits of rows (of all rows, width), without the GIL.

    Returns the token or the LlamacError of each draw.

    Args:
        samplings: A Sampling for each draw.
        positions: The position of each draw.
        histories: A History for each draw, None where the Sampling does not adjust logits.
        threads: Most threads. The tokens do not depend on it.
        rows: The row of each draw; None draws from every row.
    """
    cdef int n_rows = <int>logits.shape[0], i, row
    cdef int n_draws = n_rows if rows is None else <int>len(rows)
    if len(samplings) != n_draws or len(positions) != n_draws or (histories is not None and len(histories) != n_draws):
        raise ArgumentError(f"{n_draws} rows of logits need as many samplings, positions and histories")
    if not 1 <= n <= logits.shape[1]:
        raise ArgumentError(f"cannot sample from {n} of {logits.shape[1]} logits")
    cdef int used = llamac_draw_threads(n_draws, n, max(threads, 1))
    cdef llamac_draw *draws = NULL
    cdef void *scratch = NULL
    try:
        draws = <llamac_draw *>allocate(<size_t>n_draws, sizeof(llamac_draw), "draws")
        scratch = allocate_raw(<size_t>used * <size_t>n * SCRATCH, "sampling")
        for i in range(n_draws):
            row = i if rows is None else rows[i]
            if not 0 <= row < n_rows:
                raise ArgumentError(f"there is no row {row} in {n_rows} rows of logits")
            draw_prepare(&draws[i], <Sampling?>samplings[i], None if histories is None else histories[i],
                         positions[i])
            draws[i].logits = &logits[row, 0]
        with nogil:
            llamac_draw_rows(draws, n_draws, n, used, scratch)
        return [draw_outcome(&draws[i]) for i in range(n_draws)]
    finally:
        mem_free(draws)
        mem_free(scratch)
