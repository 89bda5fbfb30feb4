# Part of _core.pyx: what the core says about the file format, this build and this machine; hooks for tests.

def fields():
    """Return the fields of the file's records: (record, name, type, offset, count, min, max, names or None)."""
    cdef size_t n, i
    cdef const llamac_field *f = llamac_fields(&n)
    return [(f[i].record.decode(), f[i].name.decode(), f[i].type, f[i].offset, f[i].count, f[i].min, f[i].max,
             f[i].names.decode() if f[i].names is not NULL else None) for i in range(n)]


def record_bytes(str record):
    """Return the bytes of a record; of the header without its section table."""
    return llamac_record_bytes(record.encode())


def section_names():
    """Return the names of the file's sections in order."""
    cdef size_t i = 0
    names = []
    while llamac_section_at(i) is not NULL:
        names.append(llamac_section_at(i).decode())
        i += 1
    return tuple(names)


def slots(const unsigned char[::1] config not None, const unsigned char[::1] layers not None):
    """Return the tensors that a config calls for, in the file's order: (name, required, is_matrix, rows, columns).

    `config` is a config record, `layers` are its n_layers + mtp_layers layer records.
    """
    cdef size_t layer_bytes = llamac_record_bytes(b"layer"), n_layers = <size_t>layers.shape[0] // layer_bytes
    cdef size_t n_fields = 0, i, needed = 0
    cdef const llamac_field *fields = llamac_fields(&n_fields)
    if <size_t>config.shape[0] == llamac_record_bytes(b"config"):
        for i in range(n_fields):
            if fields[i].record == b"config" and fields[i].name in (b"n_layers", b"mtp_layers"):
                needed += (<const uint32_t *>&config[fields[i].offset])[0]
    if needed == 0 or n_layers != needed or <size_t>layers.shape[0] % layer_bytes:
        raise ArgumentError("slots needs a config record and its n_layers + mtp_layers layer records")
    cdef llamac_slot_iterator iterator = llamac_slot_iterator(&config[0], &layers[0], 0, 0, 0, 0, 0)
    cdef llamac_slot slot
    cdef int result
    found = []
    while (result := llamac_slot_next(&iterator, &slot)) > 0:
        found.append((slot.name.decode(), bool(slot.required), bool(slot.is_matrix), slot.rows, slot.columns))
    if result < 0:
        raise ArgumentError("n_rope or n_experts is larger than the format allows")
    return found


def isas():
    """Return the kernel sets of this build, best first: (name, whether this machine can run it)."""
    cdef int supported = 0
    cdef size_t i = 0
    found = []
    while llamac_isa_at(i, &supported) is not NULL:
        found.append((llamac_isa_at(i, &supported).decode(), bool(supported)))
        i += 1
    return found


def has_threads():
    """Return whether this build can use more than one thread."""
    return bool(llamac_has_threads())


def set_nodes(const int32_t[::1] node_of_cpu not None):
    """Say which NUMA node each CPU belongs to, at most once: the team's threads then stay on their nodes."""
    cdef llamac_error err
    check(llamac_set_nodes(&node_of_cpu[0] if node_of_cpu.shape[0] else NULL, <int>node_of_cpu.shape[0], &err), &err)


def stages():
    """Return the names of the graph's stages, in the order of computation."""
    return tuple(llamac_stage_name(i).decode() for i in range(LLAMAC_N_STAGES))


def live_objects():
    """Return the number of open C models and sessions. For tests."""
    return llamac_live_objects()


def fail_allocation(long n):
    """Make allocations of the core fail (llamac_test_fail_allocation). For tests."""
    return llamac_test_fail_allocation(n)
