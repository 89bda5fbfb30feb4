# Single operations of the graph on arrays (csrc/ops.h), included by _core.pyx. The arrays are not empty. llamac.ops has
# checked and described what they hold; here it is only checked that C stays inside them.

cdef int fits(bint condition) except -1:
    if not condition:
        raise ArgumentError("the arrays' shapes do not fit each other")
    return 0


cdef const float *vector(const float[::1] numbers, Py_ssize_t size) except? NULL:
    """The numbers of an optional vector of this size."""
    if numbers is None:
        return NULL
    fits(size > 0 and numbers.shape[0] == size)
    return &numbers[0]


cdef const char *isa_name(str isa) except? NULL:
    return NULL if isa is None else PyUnicode_AsUTF8(isa)


def op_norm(bint is_rms, const float[:, ::1] x not None, const float[::1] weight not None, const float[::1] bias,
            float eps, float[:, ::1] y not None, str isa=None):
    """y = rms_norm(x) or layer_norm(x) of rows (n, width)."""
    cdef size_t n = <size_t>x.shape[0]
    cdef int width = <int>x.shape[1], result
    cdef const float *c_weight = vector(weight, width)
    cdef const float *c_bias = vector(bias, width)
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    fits(n > 0 and y.shape[0] == x.shape[0] and y.shape[1] == width)
    with nogil:
        result = llamac_op_norm(is_rms, &x[0, 0], n, width, c_weight, c_bias, eps, c_isa, &y[0, 0], &err)
    check(result, &err)


def op_softmax(const float[:, ::1] x not None, float[:, ::1] y not None, str isa=None):
    """y = softmax(x) of rows (n, width)."""
    cdef size_t n = <size_t>x.shape[0]
    cdef int width = <int>x.shape[1], result
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    fits(n > 0 and width > 0 and y.shape[0] == x.shape[0] and y.shape[1] == width)
    with nogil:
        result = llamac_op_softmax(&x[0, 0], n, width, c_isa, &y[0, 0], &err)
    check(result, &err)


def op_activate(int activation, const float[:, ::1] x not None, float[:, ::1] y not None, str isa=None):
    """y = activation(x) of rows (n, width). activation: as in the config record."""
    cdef size_t n = <size_t>x.shape[0]
    cdef int width = <int>x.shape[1], result
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    fits(n > 0 and width > 0 and y.shape[0] == x.shape[0] and y.shape[1] == width)
    with nogil:
        result = llamac_op_activate(activation, &x[0, 0], n, width, c_isa, &y[0, 0], &err)
    check(result, &err)


def op_rope(float[:, :, ::1] x not None, const int32_t[::1] positions not None, const float[::1] inv_freq not None,
            float factor, str isa=None):
    """Rotate the heads of x (n, n_heads, head_dim) in place, for positions (n) and frequencies (half)."""
    cdef size_t n = <size_t>x.shape[0], n_heads = <size_t>x.shape[1]
    cdef int head_dim = <int>x.shape[2], half = <int>inv_freq.shape[0], result
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    fits(n > 0 and n_heads > 0 and half > 0 and 2 * half <= head_dim and positions.shape[0] == x.shape[0])
    with nogil:
        result = llamac_op_rope(&x[0, 0, 0], n, n_heads, head_dim, &positions[0], &inv_freq[0], half, factor, c_isa,
                                &err)
    check(result, &err)


def op_gather(int dtype, const unsigned char[::1] strips not None, int n_rows, const int32_t[::1] rows not None,
              float[:, ::1] y not None, str isa=None):
    """y (n, columns) = these rows of a matrix with n_rows rows."""
    cdef size_t n = <size_t>rows.shape[0], i
    cdef int columns = <int>y.shape[1], result
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    fits(n > 0 and columns > 0 and y.shape[0] == rows.shape[0] and n_rows > 0)
    fits(<size_t>strips.shape[0] == llamac_matrix_bytes(dtype, n_rows, columns))
    for i in range(n):
        fits(0 <= rows[i] < n_rows)
    with nogil:
        result = llamac_op_gather(dtype, &strips[0], columns, &rows[0], n, c_isa, &y[0, 0], &err)
    check(result, &err)


def op_quantize(int dtype, const float[:, ::1] rows not None, const float[::1] importance,
                unsigned char[::1] out not None, str isa=None, int threads=1):
    """Quantize rows (n, columns) to strips on several threads. importance: (columns) or None."""
    cdef size_t n = <size_t>rows.shape[0]
    cdef int columns = <int>rows.shape[1], result
    cdef const float *c_importance = vector(importance, columns)
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    fits(0 < n <= INT_MAX and columns > 0 and <size_t>out.shape[0] == llamac_matrix_bytes(dtype, n, columns))
    with nogil:
        result = llamac_op_quantize(dtype, &rows[0, 0], n, columns, c_importance, c_isa, threads, &out[0], &err)
    check(result, &err)


def op_matmul(int dtype, const unsigned char[::1] strips not None, const float[:, ::1] x not None,
              const float[::1] bias, int numerics, float[:, ::1] y not None, str isa=None, int threads=1):
    """y (n, rows) = x W^T + bias, for inputs x (n, columns) and the strips of W (rows, columns)."""
    cdef llamac_op_product p
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    cdef int result
    p.dtype, p.rows, p.columns, p.numerics = dtype, <int>y.shape[1], <int>x.shape[1], numerics
    p.n = <size_t>x.shape[0]
    p.bias = vector(bias, p.rows)
    fits(p.n > 0 and p.rows > 0 and p.columns > 0 and y.shape[0] == x.shape[0])
    fits(<size_t>strips.shape[0] == llamac_matrix_bytes(dtype, p.rows, p.columns))
    p.w, p.x, p.y = &strips[0], &x[0, 0], &y[0, 0]
    with nogil:
        result = llamac_op_matmul(&p, c_isa, threads, &err)
    check(result, &err)


def op_attend(const float[:, :, ::1] q not None, const float[:, :, ::1] k not None, const float[:, :, ::1] v not None,
              const int32_t[::1] begin not None, const int32_t[::1] end not None, int kv_dtype, float scale,
              float soft_cap, const float[::1] sinks, float[:, :, ::1] out not None, str isa=None, int threads=1):
    """out = softmax(scale q k^T) v: q, out (n, n_heads, head_dim); k, v (positions, n_kv_heads, head_dim).

    Query i sees positions [begin[i], end[i]).
    """
    cdef llamac_op_attention a
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    cdef int result, i
    fits(0 < q.shape[0] * q.shape[1] <= INT_MAX and 0 < k.shape[0] * k.shape[1] <= INT_MAX and q.shape[2] > 0)
    a.n_queries, a.n_heads, a.head_dim = <int>q.shape[0], <int>q.shape[1], <int>q.shape[2]
    a.n_positions, a.n_kv_heads, a.kv_dtype = <int>k.shape[0], <int>k.shape[1], kv_dtype
    fits(a.n_heads % a.n_kv_heads == 0 and k.shape[2] == a.head_dim)
    for i in range(3):
        fits(v.shape[i] == k.shape[i] and out.shape[i] == q.shape[i])
    fits(begin.shape[0] == a.n_queries and end.shape[0] == a.n_queries)
    for i in range(a.n_queries):
        fits(0 <= begin[i] < end[i] <= a.n_positions)
    a.q, a.k, a.v, a.begin, a.end = &q[0, 0, 0], &k[0, 0, 0], &v[0, 0, 0], &begin[0], &end[0]
    a.sinks, a.scale, a.soft_cap, a.out = vector(sinks, a.n_heads), scale, soft_cap, &out[0, 0, 0]
    with nogil:
        result = llamac_op_attend(&a, c_isa, threads, &err)
    check(result, &err)


def op_sample(const float[::1] logits not None, Sampling sampling not None, uint64_t position, str isa=None):
    """Draw a token id from logits (n)."""
    cdef int n = <int>logits.shape[0], token
    fits(n > 0)
    cdef bytearray scratch = bytearray(<size_t>n * LLAMAC_SAMPLE_SCRATCH)
    cdef char *c_scratch = scratch
    cdef const char *c_isa = isa_name(isa)
    cdef llamac_error err
    with nogil:
        token = llamac_op_sample(&logits[0], n, &sampling._c, position, c_isa, c_scratch, &err)
    return check(token, &err)
