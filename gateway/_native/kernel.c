/* Functions over the bytes of requests and log lines; `pure.py` has the same ones in Python and says what they do.

   The bytes come from strangers: every read is bounded by the end of its buffer, every loop is linear in it, nothing
   recurses, and no length that a client states is used before it was compared with the bytes that are there. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

typedef struct {
    PyObject *digest;     /* xxhash.xxh3_64_intdigest */
    PyObject *role;       /* "role" */
    PyObject *content;    /* "content" */
    PyObject *host;       /* b"host" */
    PyObject *length;     /* b"content-length" */
} State;

static State *state_of(PyObject *module)
{
    return (State *)PyModule_GetState(module);
}

static int check_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments, %zd expected", given, wanted);
    return 0;
}

/* key_count */

/* The quotation mark that ends a string which begins at `at`; NULL = it does not end. */
static const char *string_end(const char *at, const char *end)
{
    for (;;) {
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (quote == NULL)
            return NULL;
        const char *escapes = quote;
        while (escapes > at && escapes[-1] == '\\')
            escapes--;
        if ((quote - escapes) % 2 == 0)
            return quote;
        at = quote + 1;
    }
}

static Py_ssize_t count_keys(const char *at, Py_ssize_t size, Py_ssize_t max_depth)
{
    const char *end = at + size;
    Py_ssize_t depth = 0, keys = 0;
    while (at < end) {
        switch (*at++) {
        case '"':
            at = string_end(at, end);
            if (at == NULL)
                return depth == 0 ? keys : -1;
            at++;
            break;
        case '\\': /* outside a string: no JSON, but read alike everywhere */
            if (at < end && (*at == '\\' || *at == '"'))
                at++;
            break;
        case ':':
            keys += depth == 1;
            break;
        case '{':
        case '[':
            if (++depth > max_depth)
                return -1;
            break;
        case '}':
        case ']':
            if (--depth < 0)
                return -1;
            break;
        }
    }
    return depth == 0 ? keys : -1;
}

static PyObject *key_count(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (!check_count(given, 2))
        return NULL;
    if (!PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the body must be bytes");
        return NULL;
    }
    Py_ssize_t max_depth = PyLong_AsSsize_t(args[1]);
    if (max_depth == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromSsize_t(count_keys(PyBytes_AS_STRING(args[0]), PyBytes_GET_SIZE(args[0]), max_depth));
}

/* whole_request */

enum { MAX_HEAD = 4096, MAX_FIELDS = 32, MAX_NAME = 64, MAX_TARGET = 512, MAX_DIGITS = 10 };

static int is_alphanumeric(unsigned char byte)
{
    return (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

static int is_target(unsigned char byte)
{
    return is_alphanumeric(byte) || (byte != 0 && strchr("/._?=&%:@+~-", byte) != NULL);
}

static int starts(const char *at, const char *end, const char *text)
{
    size_t size = strlen(text);
    return (size_t)(end - at) >= size && memcmp(at, text, size) == 0;
}

static int is_text(const char *at, size_t size, const char *text)
{
    return strlen(text) == size && memcmp(at, text, size) == 0;
}

/* The end of the request line's target, which begins at `at` and must be followed by the version; NULL = unusual. */
static const char *target_end(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && is_target((unsigned char)*at))
        at++;
    if (at == start || *start != '/' || at - start > MAX_TARGET || !starts(at, end, " HTTP/1.1\r\n"))
        return NULL;
    return at;
}

/* A header field: where its parts are, with the name in lower case. */
typedef struct {
    char name[MAX_NAME];
    size_t name_size;
    const char *value;
    size_t value_size;
} Field;

/* Reads a field and its line end at `at`. Returns what follows; NULL = unusual. */
static const char *read_field(const char *at, const char *end, Field *field)
{
    size_t size = 0;
    while (at < end && size < MAX_NAME && (is_alphanumeric((unsigned char)*at) || *at == '-')) {
        char byte = *at++;
        field->name[size++] = byte >= 'A' && byte <= 'Z' ? (char)(byte | 0x20) : byte;
    }
    field->name_size = size;
    if (size == 0 || at == end || *at++ != ':')
        return NULL;
    if (at < end && *at == ' ')
        at++;
    field->value = at;
    while (at < end && *at >= ' ' && *at <= '~')
        at++;
    field->value_size = (size_t)(at - field->value);
    if (field->value_size == 0 || *field->value == ' ' || at[-1] == ' ' || !starts(at, end, "\r\n"))
        return NULL;
    return at + 2;
}

static int is_framing(const Field *field)
{
    return is_text(field->name, field->name_size, "expect")
        || is_text(field->name, field->name_size, "proxy-connection")
        || is_text(field->name, field->name_size, "transfer-encoding")
        || is_text(field->name, field->name_size, "upgrade");
}

static int closes(const Field *field)
{
    return is_text(field->name, field->name_size, "connection")
        && !(field->value_size == 10 && PyOS_strnicmp(field->value, "keep-alive", 10) == 0);
}

/* Keeps a field if it is known. Returns 1; 0 = unusual; -1 = exception. */
static int keep_field(const Field *field, PyObject *known, PyObject *headers)
{
    if (is_framing(field))
        return 0;
    PyObject *name = PyBytes_FromStringAndSize(field->name, (Py_ssize_t)field->name_size);
    if (name == NULL)
        return -1;
    int result = PySequence_Contains(known, name);
    if (result == 1) {
        Py_ssize_t others = PyDict_GET_SIZE(headers);
        PyObject *value = PyBytes_FromStringAndSize(field->value, (Py_ssize_t)field->value_size);
        result = value == NULL || PyDict_SetItem(headers, name, value) < 0 ? -1 : PyDict_GET_SIZE(headers) > others;
        Py_XDECREF(value);
    }
    else if (result == 0) {
        result = !closes(field);
    }
    Py_DECREF(name);
    return result;
}

/* Whether there is a host, and the body is as long as stated. 1 = yes; 0 = no; -1 = exception. */
static int is_complete(const State *state, PyObject *headers, Py_ssize_t body_size)
{
    int has_host = PyDict_Contains(headers, state->host);
    if (has_host != 1)
        return has_host;
    PyObject *value = PyDict_GetItemWithError(headers, state->length);
    if (value == NULL)
        return PyErr_Occurred() ? -1 : body_size == 0;
    const char *digit = PyBytes_AS_STRING(value);
    Py_ssize_t digits = PyBytes_GET_SIZE(value);
    long long length = 0;
    if (digits > MAX_DIGITS)
        return 0;
    for (Py_ssize_t place = 0; place < digits; place++) {
        if (digit[place] < '0' || digit[place] > '9')
            return 0;
        length = 10 * length + (digit[place] - '0');
    }
    return length == body_size;
}

/* Reads the fields up to the empty line. Returns the body's start; NULL = unusual, or an exception. */
static const char *read_fields(const char *at, const char *end, PyObject *known, PyObject *headers)
{
    for (int fields = 0; fields < MAX_FIELDS; fields++) {
        Field field;
        at = read_field(at, end, &field);
        if (at == NULL || keep_field(&field, known, headers) != 1)
            return NULL;
        if (starts(at, end, "\r\n"))
            return at + 2;
    }
    return NULL;
}

static PyObject *read_request(const State *state, const char *data, Py_ssize_t size, PyObject *known)
{
    const char *end = data + size, *head_end = size > MAX_HEAD ? data + MAX_HEAD : end;
    Py_ssize_t method_size = starts(data, head_end, "GET ") ? 3 : starts(data, head_end, "POST ") ? 4 : 0;
    if (method_size == 0)
        Py_RETURN_NONE;
    const char *target = data + method_size + 1, *version = target_end(target, head_end);
    if (version == NULL)
        Py_RETURN_NONE;
    PyObject *headers = PyDict_New();
    if (headers == NULL)
        return NULL;
    const char *body = read_fields(version + strlen(" HTTP/1.1\r\n"), head_end, known, headers);
    int complete = body == NULL ? 0 : is_complete(state, headers, end - body);
    PyObject *found = NULL;
    if (complete == 1)
        found = Py_BuildValue(
            "(y#y#Oy#)", data, method_size, target, (Py_ssize_t)(version - target), headers, body, (Py_ssize_t)(end - body));
    else if (!PyErr_Occurred())
        found = Py_NewRef(Py_None);
    Py_DECREF(headers);
    return found;
}

static PyObject *whole_request(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer data;
    if (!check_count(given, 2) || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = read_request(state_of(module), data.buf, data.len, args[1]);
    PyBuffer_Release(&data);
    return found;
}

/* event_chunks */

enum { MAX_SIZE_DIGITS = 6 };

/* What follows a chunk that is here as a whole and ends like an event; NULL = unusual. */
static const char *chunk_end(const char *at, const char *end)
{
    const char *digits_end = end - at > MAX_SIZE_DIGITS ? at + MAX_SIZE_DIGITS : end;
    Py_ssize_t size = 0;
    for (; at < digits_end && is_alphanumeric((unsigned char)*at) && (*at | 0x20) <= 'f'; at++)
        size = 16 * size + (*at <= '9' ? *at - '0' : (*at | 0x20) - 'a' + 10);
    if (size < 2 || !starts(at, end, "\r\n") || end - at < size + 4)
        return NULL;
    at += size;
    return starts(at, end, "\n\n\r\n") ? at + 4 : NULL;
}

/* Whether an event is more than a piece of text. */
static int is_special(const char *data, const char *end)
{
    if (end - data > 16 && starts(end - 16, end, "data: [DONE]\n\n\r\n"))
        return 1;
    for (const char *at = data; (at = memchr(at, '"', (size_t)(end - at))) != NULL; at++)
        if (starts(at, end, "\"usage\"") || starts(at, end, "\"finish_reason\":\"abort\"")
            || (at - data > 7 && starts(at - 7, end, "data: {\"error\"")))
            return 1;
    return 0;
}

static PyObject *event_chunks(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (!check_count(given, 1))
        return NULL;
    if (!PyBytes_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "the chunks must be bytes");
    const char *data = PyBytes_AS_STRING(args[0]), *end = data + PyBytes_GET_SIZE(args[0]), *at = data;
    Py_ssize_t chunks = 0;
    for (; at != NULL && at < end; chunks++)
        at = chunk_end(at, end);
    if (at == NULL || is_special(data, end))
        chunks = 0;
    return PyLong_FromSsize_t(chunks);
}

/* text_turns */

enum { LEAST_TURN = 512 };

/* A string as UTF-8, with a new reference to what holds the bytes; NULL = exception. */
static PyObject *utf8_of(PyObject *text, const char **bytes, Py_ssize_t *size)
{
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        *bytes = (const char *)PyUnicode_1BYTE_DATA(text);
        *size = PyUnicode_GET_LENGTH(text);
        return Py_NewRef(text);
    }
    PyObject *encoded = PyUnicode_AsUTF8String(text);
    if (encoded != NULL) {
        *bytes = PyBytes_AS_STRING(encoded);
        *size = PyBytes_GET_SIZE(encoded);
    }
    return encoded;
}

/* The canonical bytes of a turn. NULL = exception. */
static PyObject *turn_piece(PyObject *role, PyObject *content)
{
    const char *role_bytes, *content_bytes;
    Py_ssize_t role_size, content_size;
    PyObject *piece = NULL, *holder = utf8_of(role, &role_bytes, &role_size);
    if (holder == NULL)
        return NULL;
    PyObject *other = utf8_of(content, &content_bytes, &content_size);
    if (other != NULL && role_size <= PY_SSIZE_T_MAX - 2 - content_size)
        piece = PyBytes_FromStringAndSize(NULL, role_size + content_size + 2);
    if (piece != NULL) {
        char *at = PyBytes_AS_STRING(piece);
        *at = '\x1e';
        memcpy(at + 1, role_bytes, (size_t)role_size);
        at[1 + role_size] = '\x1f';
        memcpy(at + 2 + role_size, content_bytes, (size_t)content_size);
    }
    Py_DECREF(holder);
    Py_XDECREF(other);
    return piece;
}

/* The piece of a turn of plain text. NULL without an exception = it is another turn, or it has no room. */
static PyObject *plain_turn(const State *state, PyObject *turn, Py_ssize_t room, int *is_answer)
{
    if (room <= 0 || !PyDict_CheckExact(turn) || PyDict_GET_SIZE(turn) != 2)
        return NULL;
    PyObject *role = PyDict_GetItemWithError(turn, state->role);
    PyObject *content = role == NULL ? NULL : PyDict_GetItemWithError(turn, state->content);
    if (content == NULL || !PyUnicode_CheckExact(role) || !PyUnicode_CheckExact(content))
        return NULL;
    if (PyUnicode_GET_LENGTH(content) > room)
        return NULL;
    *is_answer = PyUnicode_CompareWithASCIIString(role, "assistant") == 0;
    return turn_piece(role, content);
}

static PyObject *text_turns(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    const State *state = state_of(module);
    if (!check_count(given, 2))
        return NULL;
    Py_ssize_t room = PyLong_AsSsize_t(args[1]), answer = -1;
    if (room == -1 && PyErr_Occurred())
        return NULL;
    if (!PyList_CheckExact(args[0]))
        Py_RETURN_NONE;
    PyObject *turns = args[0], *pieces = PyList_New(0);
    if (pieces == NULL)
        return NULL;
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(turns); place++) {
        int is_answer = 0;
        PyObject *piece = plain_turn(state, PyList_GET_ITEM(turns, place), room, &is_answer);
        if (piece == NULL || PyList_Append(pieces, piece) < 0) {
            Py_XDECREF(piece);
            Py_DECREF(pieces);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
        Py_ssize_t size = PyBytes_GET_SIZE(piece);
        room -= size > LEAST_TURN ? size : LEAST_TURN;
        if (is_answer)
            answer = place;
        Py_DECREF(piece);
    }
    return Py_BuildValue("(Nn)", pieces, answer);
}

/* prefix_keys */

static const struct {
    Py_ssize_t step, until;
} SIZES[] = {{256, 4096}, {512, 8192}, {1024, 16384}, {2048, 32768}, {4096, 2097152}};
enum { LONGEST = 2097152 };

static Py_ssize_t step_at(Py_ssize_t position)
{
    int place = 0;
    while (place < 4 && position >= SIZES[place].until)
        place++;
    return SIZES[place].step;
}

static int append_number(PyObject *list, Py_ssize_t number)
{
    PyObject *boxed = PyLong_FromSsize_t(number);
    int failed = boxed == NULL || PyList_Append(list, boxed) < 0;
    Py_XDECREF(boxed);
    return failed ? -1 : 0;
}

/* What a prompt's blocks are collected in. `chain`: the last key, borrowed from `keys` or from the caller. */
typedef struct {
    PyObject *keys, *edges, *ends, *chain;
} Collected;

static int add_block(const State *state, Collected *to, const char *at, Py_ssize_t size, Py_ssize_t edge)
{
    PyObject *block = PyBytes_FromStringAndSize(at, size);
    if (block == NULL)
        return -1;
    PyObject *both[] = {block, to->chain};
    PyObject *key = PyObject_Vectorcall(state->digest, both, 2, NULL);
    Py_DECREF(block);
    if (key == NULL)
        return -1;
    int failed = PyList_Append(to->keys, key);
    to->chain = key;
    Py_DECREF(key);
    return failed < 0 ? -1 : append_number(to->edges, edge);
}

static int add_piece(const State *state, Collected *to, const char *piece, Py_ssize_t size, Py_ssize_t position)
{
    Py_ssize_t at = 0;
    while (at < size) {
        Py_ssize_t step = step_at(position + at), left = size - at;
        Py_ssize_t taken = left < step ? left : step;
        if (add_block(state, to, piece + at, taken, position + at + taken) < 0)
            return -1;
        at += taken;
    }
    return append_number(to->ends, PyList_GET_SIZE(to->keys));
}

static int add_pieces(const State *state, Collected *to, PyObject *pieces)
{
    Py_ssize_t position = 0;
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pieces) && position < LONGEST; place++) {
        PyObject *piece = PyList_GET_ITEM(pieces, place);
        if (!PyBytes_CheckExact(piece)) {
            PyErr_SetString(PyExc_TypeError, "the pieces must be bytes");
            return -1;
        }
        Py_ssize_t size = PyBytes_GET_SIZE(piece);
        if (size > LONGEST - position)
            size = LONGEST - position;
        Py_INCREF(piece);
        int failed = add_piece(state, to, PyBytes_AS_STRING(piece), size, position);
        Py_DECREF(piece);
        if (failed < 0)
            return -1;
        position += size;
    }
    return 0;
}

static PyObject *prefix_keys(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    if (!check_count(given, 2))
        return NULL;
    if (!PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the pieces must be a list");
        return NULL;
    }
    Collected to = {PyList_New(0), PyList_New(0), PyList_New(0), args[1]};
    PyObject *result = NULL;
    if (to.keys != NULL && to.edges != NULL && to.ends != NULL && add_pieces(state_of(module), &to, args[0]) == 0) {
        PyObject *keys = PyList_AsTuple(to.keys), *edges = PyList_AsTuple(to.edges), *ends = PyList_AsTuple(to.ends);
        if (keys != NULL && edges != NULL && ends != NULL)
            result = PyTuple_Pack(3, keys, edges, ends);
        Py_XDECREF(keys);
        Py_XDECREF(edges);
        Py_XDECREF(ends);
    }
    Py_XDECREF(to.keys);
    Py_XDECREF(to.edges);
    Py_XDECREF(to.ends);
    return result;
}

/* json_line */

enum { LONGEST_LINE = 4096, LONGEST_NUMBER = 24 };

/* Appends a number at `at`, with so many decimals but their last zeros. Returns what follows. */
static char *add_number(char *at, uint64_t number, int decimals)
{
    char digits[LONGEST_NUMBER], *end = digits + LONGEST_NUMBER, *first = end;
    for (int place = 0; number > 0 || place <= decimals; place++, number /= 10) {
        if (place > 0 && place == decimals)
            *--first = '.';
        *--first = (char)('0' + number % 10);
    }
    while (decimals > 0 && end[-1] == '0' && end[-2] != '.')
        end--;
    return (char *)memcpy(at, first, (size_t)(end - first)) + (end - first);
}

/* Appends a value at `at`. Returns what follows; NULL = unusual, or it may not fit before `end`. */
static char *add_value(char *at, const char *end, PyObject *value)
{
    int is_text = PyUnicode_CheckExact(value) && PyUnicode_IS_COMPACT_ASCII(value);
    if (end - at < LONGEST_NUMBER + (is_text ? PyUnicode_GET_LENGTH(value) : 0))
        return NULL;
    if (is_text) {
        const char *byte = (const char *)PyUnicode_1BYTE_DATA(value), *stop = byte + PyUnicode_GET_LENGTH(value);
        for (*at++ = '"'; byte < stop; *at++ = *byte++)
            if (*byte < ' ' || *byte == '"' || *byte == '\\')
                return NULL;
        *at = '"';
        return at + 1;
    }
    if (PyLong_CheckExact(value) || PyFloat_CheckExact(value)) {
        int overflow, decimals = PyFloat_CheckExact(value) ? 3 : 0;
        double number = decimals ? PyFloat_AS_DOUBLE(value) : (double)PyLong_AsLongLongAndOverflow(value, &overflow);
        uint64_t thousandths = number >= 0 && number < 1e12 ? (uint64_t)(number * 1e3 + 0.5) : 0;
        if ((double)thousandths / 1e3 != number || 1 / number < 0) /* more than 15 digits, negative, or -0.0 */
            return NULL;
        return add_number(at, decimals ? thousandths : thousandths / 1000, decimals);
    }
    const char *word = value == Py_None ? "null" : value == Py_True ? "true" : value == Py_False ? "false" : NULL;
    return word == NULL ? NULL : (char *)memcpy(at, word, 5) + strlen(word);
}

static PyObject *json_line(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 2 || !PyBytes_CheckExact(args[0]) || !PyList_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "bytes and a list expected");
    char line[LONGEST_LINE], *at = line, *end = line + LONGEST_LINE;
    const char *from = PyBytes_AS_STRING(args[0]), *stop = from + PyBytes_GET_SIZE(args[0]), *mark;
    Py_ssize_t place = 0, values = PyList_GET_SIZE(args[1]);
    while (at != NULL && (mark = memchr(from, '%', (size_t)(stop - from))) != NULL) {
        if (mark[1] != 'b' || place == values || mark - from > end - at)
            Py_RETURN_NONE;
        at = (char *)memcpy(at, from, (size_t)(mark - from)) + (mark - from);
        at = add_value(at, end, PyList_GET_ITEM(args[1], place++));
        from = mark + 2;
    }
    if (at == NULL || place < values || stop - from > end - at)
        Py_RETURN_NONE;
    memcpy(at, from, (size_t)(stop - from));
    return PyBytes_FromStringAndSize(line, at - line + (stop - from));
}

/* The module. */

static int begin(PyObject *module)
{
    State *state = state_of(module);
    PyObject *xxhash = PyImport_ImportModule("xxhash");
    if (xxhash == NULL)
        return -1;
    state->digest = PyObject_GetAttrString(xxhash, "xxh3_64_intdigest");
    Py_DECREF(xxhash);
    state->role = PyUnicode_InternFromString("role");
    state->content = PyUnicode_InternFromString("content");
    state->host = PyBytes_FromString("host");
    state->length = PyBytes_FromString("content-length");
    return state->digest && state->role && state->content && state->host && state->length ? 0 : -1;
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = state_of(module);
    Py_VISIT(state->digest);
    return 0;
}

static int clear(PyObject *module)
{
    State *state = state_of(module);
    Py_CLEAR(state->digest);
    Py_CLEAR(state->role);
    Py_CLEAR(state->content);
    Py_CLEAR(state->host);
    Py_CLEAR(state->length);
    return 0;
}

static void end(void *module)
{
    clear(module);
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef METHODS[] = {
    FUNCTION(key_count), FUNCTION(whole_request), FUNCTION(event_chunks), FUNCTION(text_turns), FUNCTION(prefix_keys),
    FUNCTION(json_line), {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, begin}, {0, NULL}};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "gateway._native.kernel", .m_size = sizeof(State), .m_methods = METHODS,
    .m_slots = SLOTS, .m_traverse = traverse, .m_clear = clear, .m_free = end,
};

PyMODINIT_FUNC PyInit_kernel(void)
{
    return PyModuleDef_Init(&MODULE);
}
