/* Functions over the bytes of requests and log lines; `pure.py` has the same ones in Python and says what they do.

   The bytes come from strangers: every read is bounded by the end of its buffer, every loop is linear in it, nothing
   recurses, and no length that a client states is used before it was compared with the bytes that are there. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

enum { SLOTS_OF_KEYS = 64, LEAST_TURN = 512 };

typedef struct {
    PyObject *digest;     /* xxhash.xxh3_64_intdigest */
    PyObject *parse;      /* orjson.loads: judges numbers with more than digits, and strings with escapes */
    PyObject *keys[SLOTS_OF_KEYS]; /* usual ones of JSON objects */
    PyObject *host;       /* b"host" */
    PyObject *length;     /* b"content-length" */
} State;

static State *state_of(PyObject *module)
{
    return (State *)PyModule_GetState(module);
}

static int is_alphanumeric(unsigned char byte)
{
    return (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

static int is_text(const char *at, size_t size, const char *text)
{
    return strlen(text) == size && memcmp(at, text, size) == 0;
}

/* json_object */

enum { DEEPEST = 128, PLAIN_DIGITS = 18 };

/* A JSON text, read up to `at`. */
typedef struct {
    const char *at, *end;
    State *state;
} Text;

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

static PyObject *parsed(const Text *text, const char *start)
{
    PyObject *token = PyBytes_FromStringAndSize(start, text->at - start);
    PyObject *value = token == NULL ? NULL : PyObject_CallOneArg(text->state->parse, token);
    Py_XDECREF(token);
    return value;
}

/* Reads a string whose quotation mark was read. NULL = an exception, or it is none. */
static PyObject *read_string(Text *text)
{
    const char *start = text->at, *quote = string_end(start, text->end);
    unsigned char all = 0, control = 0;
    if (quote == NULL)
        return NULL;
    text->at = quote + 1;
    if (memchr(start, '\\', (size_t)(quote - start)) != NULL)
        return parsed(text, start - 1);
    for (const char *byte = start; byte < quote; byte++) {
        all |= (unsigned char)*byte;
        control |= (unsigned char)*byte < ' ';
    }
    if (control || all >= 0x80)
        return control ? NULL : PyUnicode_DecodeUTF8(start, quote - start, NULL);
    PyObject *string = PyUnicode_New(quote - start, 0x7f);
    if (string != NULL)
        memcpy(PyUnicode_1BYTE_DATA(string), start, (size_t)(quote - start));
    return string;
}

/* Usual keys, made once: those of a text are then the same objects, with their hashes. */
static const char *const USUAL[] = {
    "model", "messages", "role", "content", "stream", "stream_options", "include_usage", "temperature", "top_p",
    "max_tokens", "max_completion_tokens", "stop", "seed", "user", "input", "encoding_format", "prompt", "type",
    "text", "tools", "tool_calls", "tool_call_id", "function", "name", "arguments", "id", "query", "documents",
};

static PyObject **slot_of(State *state, const char *key, size_t size)
{
    return &state->keys[(5 * size + (unsigned char)key[0] + 50 * (unsigned char)key[size - 1]) % SLOTS_OF_KEYS];
}

/* Reads a key whose quotation mark was read. NULL = an exception, or it is none. */
static PyObject *read_key(Text *text)
{
    const char *start = text->at, *quote = memchr(start, '"', (size_t)(text->end - start));
    if (quote == NULL || quote == start)
        return read_string(text);
    PyObject *usual = *slot_of(text->state, start, (size_t)(quote - start));
    if (usual == NULL || !is_text(start, (size_t)(quote - start), (const char *)PyUnicode_1BYTE_DATA(usual)))
        return read_string(text);
    text->at = quote + 1;
    return Py_NewRef(usual);
}

/* Reads a value whose first byte, the mark, was read. NULL = an exception, or it is none. */
static PyObject *read_scalar(Text *text, int mark)
{
    const char *start = text->at - 1, *digit = start;
    long long number = 0;
    if (mark == '"' || mark < 0)
        return mark < 0 ? NULL : read_string(text);
    while (text->at < text->end && (is_alphanumeric((unsigned char)*text->at) || memchr("+-.", *text->at, 3) != NULL))
        text->at++;
    size_t size = (size_t)(text->at - start);
    if (is_text(start, size, "null"))
        return Py_NewRef(Py_None);
    if (is_text(start, size, "true") || is_text(start, size, "false"))
        return PyBool_FromLong(*start == 't');
    while (digit < text->at && *digit >= '0' && *digit <= '9' && digit - start < PLAIN_DIGITS)
        number = 10 * number + (*digit++ - '0');
    return digit == text->at && (*start != '0' || size == 1) ? PyLong_FromLongLong(number) : parsed(text, start);
}

/* Skips spaces, and reads the byte that follows; -1 = the end. */
static int next_mark(Text *text)
{
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\n' || *text->at == '\t' || *text->at == '\r'))
        text->at++;
    return text->at < text->end ? (unsigned char)*text->at++ : -1;
}

/* Adds a value, and lets go of it and its key. 0 = an exception; or `once`, and the key was there. */
static int add_value(PyObject *to, PyObject *key, PyObject *value, int once)
{
    int added = 0;
    if (value != NULL && key != NULL) {
        Py_ssize_t size = PyDict_GET_SIZE(to);
        added = PyDict_SetItem(to, key, value) == 0 && !(once && PyDict_GET_SIZE(to) == size);
    }
    else if (value != NULL)
        added = PyList_Append(to, value) == 0;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return added;
}

/* Reads what is in an object whose brace was read. 0 = an exception, or it is not to be had. */
static int read_values(Text *text, PyObject *object, Py_ssize_t max_depth)
{
    PyObject *open[DEEPEST] = {object};
    Py_ssize_t depth = 1;
    int is_empty = 1;
    while (depth > 0) {
        PyObject *inside = open[depth - 1], *key = NULL, *value;
        int is_object = PyDict_CheckExact(inside);
        int mark = next_mark(text);
        if (mark == (is_object ? '}' : ']')) {
            is_empty = 0;
            depth--;
            continue;
        }
        if (!is_empty && mark != ',')
            return 0;
        if (!is_empty)
            mark = next_mark(text);
        if (is_object && mark == '"' && (key = read_key(text)) != NULL)
            mark = next_mark(text) == ':' ? next_mark(text) : -1;
        else if (is_object)
            return 0;
        is_empty = mark == '{' || mark == '[';
        value = mark == '{' ? PyDict_New() : mark == '[' ? PyList_New(0) : read_scalar(text, mark);
        if (!add_value(inside, key, value, depth == 1) || (is_empty && depth == max_depth))
            return 0;
        if (is_empty)
            open[depth++] = value;
    }
    return next_mark(text) == -1;
}

static PyObject *json_object(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    if (given != 2 || !PyBytes_CheckExact(args[0]))
        return PyErr_Format(PyExc_TypeError, "a body and a depth expected");
    const char *start = PyBytes_AS_STRING(args[0]);
    Text text = {start, start + PyBytes_GET_SIZE(args[0]), state_of(module)};
    Py_ssize_t max_depth = PyLong_AsSsize_t(args[1]); /* -1 with an exception if it is none */
    PyObject *object = next_mark(&text) != '{' || max_depth < 1 ? NULL : PyDict_New();
    if (object != NULL && !read_values(&text, object, max_depth < DEEPEST ? max_depth : DEEPEST))
        Py_CLEAR(object);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_ValueError)) /* a string or a number is not valid */
        PyErr_Clear();
    return object == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : object;
}

/* whole_request */

enum { MAX_HEAD = 4096, MAX_FIELDS = 32, MAX_NAME = 64, MAX_TARGET = 512, MAX_DIGITS = 10, MAX_SIZE_DIGITS = 6 };

static int is_target(unsigned char byte)
{
    return is_alphanumeric(byte) || (byte != 0 && strchr("/._?=&%:@+~-", byte) != NULL);
}

static int starts(const char *at, const char *end, const char *text)
{
    size_t size = strlen(text);
    return (size_t)(end - at) >= size && memcmp(at, text, size) == 0;
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
    else if (result == 0)
        result = !closes(field);
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
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "data and known names expected");
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = read_request(state_of(module), data.buf, data.len, args[1]);
    PyBuffer_Release(&data);
    return found;
}

/* event_chunks */

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

/* The beginnings of what makes an event special, sixteen places at a time: without one of them, an event is a piece of
 * text. A text may have them, too. */
typedef unsigned char bytes16 __attribute__((vector_size(16)));

static int may_be_special(const char *data, const char *end)
{
    bytes16 at, next, found = {0};
    uint64_t halves[2];
    for (const char *last = end - sizeof at - 1;; data = data + sizeof at < last ? data + sizeof at : last) {
        memcpy(&at, data, sizeof at);
        memcpy(&next, data + 1, sizeof next);
        found |= ((at == '"') & ((next == 'u') | (next == 'a') | (next == 'e'))) | ((at == '[') & (next == 'D'));
        if (data >= last)
            break;
    }
    memcpy(halves, &found, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

/* Whether an event is more than a piece of text. */
static int is_special(const char *data, const char *end)
{
    if (end - data > (Py_ssize_t)sizeof(bytes16) && !may_be_special(data, end))
        return 0;
    for (const char *at = data; (at = memchr(at, '[', (size_t)(end - at))) != NULL; at++)
        if (starts(at, end, "[DONE]"))
            return 1;
    for (const char *at = data; (at = memchr(at, '"', (size_t)(end - at))) != NULL; at++) /* a 0 follows the last byte */
        if (at[1] == 'u' ? starts(at, end, "\"usage\"")
            : at[1] == 'a' && at - data > 15 ? starts(at - 16, end, "\"finish_reason\":\"abort\"")
            : at[1] == 'e' && at - data > 7 && starts(at - 7, end, "data: {\"error\""))
            return 1;
    return 0;
}

static PyObject *event_chunks(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    if (given != 1 || !PyBytes_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "chunks, which are bytes, expected");
    const char *data = PyBytes_AS_STRING(args[0]), *end = data + PyBytes_GET_SIZE(args[0]), *at = data;
    Py_ssize_t chunks = 0;
    for (; at != NULL && at < end; chunks++)
        at = chunk_end(at, end);
    if (at == NULL || is_special(data, end))
        chunks = 0;
    return PyLong_FromSsize_t(chunks);
}

/* text_turns */

/* The canonical bytes of a turn. NULL = exception. */
static PyObject *turn_piece(PyObject *role, PyObject *content)
{
    Py_ssize_t role_size, size;
    const char *role_bytes = PyUnicode_AsUTF8AndSize(role, &role_size);
    const char *bytes = role_bytes == NULL ? NULL : PyUnicode_AsUTF8AndSize(content, &size);
    PyObject *piece = bytes == NULL ? NULL : PyBytes_FromStringAndSize(NULL, role_size + size + 2);
    if (piece != NULL) {
        char *at = PyBytes_AS_STRING(piece);
        *at = '\x1e';
        memcpy(at + 1, role_bytes, (size_t)role_size);
        at[1 + role_size] = '\x1f';
        memcpy(at + 2 + role_size, bytes, (size_t)size);
    }
    return piece;
}

static int is_ascii(PyObject *text, const char *wanted)
{
    return PyUnicode_CheckExact(text) && PyUnicode_IS_COMPACT_ASCII(text)
        && is_text((const char *)PyUnicode_1BYTE_DATA(text), (size_t)PyUnicode_GET_LENGTH(text), wanted);
}

/* The piece of a turn of plain text. NULL without an exception = it is another turn, or it has no room. */
static PyObject *plain_turn(PyObject *turn, Py_ssize_t room, int *is_answer)
{
    PyObject *name, *value, *role = NULL, *content = NULL;
    Py_ssize_t place = 0;
    if (room <= 0 || !PyDict_CheckExact(turn) || PyDict_GET_SIZE(turn) != 2)
        return NULL;
    while (PyDict_Next(turn, &place, &name, &value)) {
        if (is_ascii(name, "role"))
            role = value;
        else if (is_ascii(name, "content"))
            content = value;
    }
    if (role == NULL || content == NULL || !PyUnicode_CheckExact(role) || !PyUnicode_CheckExact(content))
        return NULL;
    if (PyUnicode_GET_LENGTH(content) > room)
        return NULL;
    *is_answer = is_ascii(role, "assistant");
    return turn_piece(role, content);
}

static PyObject *text_turns(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "turns and their room expected");
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
        PyObject *piece = plain_turn(PyList_GET_ITEM(turns, place), room, &is_answer);
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
    PyObject *index = PyLong_FromSsize_t(answer), *found = index == NULL ? NULL : PyTuple_Pack(2, pieces, index);
    Py_DECREF(pieces);
    Py_XDECREF(index);
    return found;
}

/* prefix_keys */

static const struct { Py_ssize_t step, until; } SIZES[] = {{256, 4096}, {512, 8192}, {1024, 16384}, {2048, 32768}, {4096, 2097152}};
enum { LONGEST = 2097152 };

static Py_ssize_t step_at(Py_ssize_t position)
{
    int place = 0;
    while (place < 4 && position >= SIZES[place].until)
        place++;
    return SIZES[place].step;
}

/* The blocks of a prompt, so far. `keys`: NULL = they are only counted. `chain`: the last key, borrowed. */
typedef struct {
    PyObject *keys, *edges, *ends, *chain;
    Py_ssize_t blocks, pieces;
} Blocks;

static int add_block(const State *state, Blocks *to, const char *at, Py_ssize_t size, Py_ssize_t edge)
{
    PyObject *block = PyBytes_FromStringAndSize(at, size), *number = PyLong_FromSsize_t(edge), *key = NULL;
    if (block != NULL && number != NULL) {
        PyObject *both[] = {block, to->chain};
        key = PyObject_Vectorcall(state->digest, both, 2, NULL);
    }
    Py_XDECREF(block);
    if (key == NULL) {
        Py_XDECREF(number);
        return -1;
    }
    to->chain = key;
    PyTuple_SET_ITEM(to->keys, to->blocks, key);
    PyTuple_SET_ITEM(to->edges, to->blocks, number);
    return 0;
}

static int add_piece(const State *state, Blocks *to, const char *piece, Py_ssize_t size, Py_ssize_t position)
{
    for (Py_ssize_t at = 0; at < size; to->blocks++) {
        Py_ssize_t step = step_at(position + at), left = size - at;
        Py_ssize_t taken = left < step ? left : step;
        if (to->keys != NULL && add_block(state, to, piece + at, taken, position + at + taken) < 0)
            return -1;
        at += taken;
    }
    PyObject *number = to->keys == NULL ? NULL : PyLong_FromSsize_t(to->blocks);
    if (number != NULL)
        PyTuple_SET_ITEM(to->ends, to->pieces, number);
    to->pieces++;
    return number == NULL && to->keys != NULL ? -1 : 0;
}

static int add_pieces(const State *state, Blocks *to, PyObject *pieces)
{
    Py_ssize_t position = 0;
    to->blocks = to->pieces = 0;
    while (to->pieces < PyTuple_GET_SIZE(pieces) && position < LONGEST) {
        char *piece;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(pieces, to->pieces), &piece, &size) < 0)
            return -1;
        if (size > LONGEST - position)
            size = LONGEST - position;
        if (add_piece(state, to, piece, size, position) < 0)
            return -1;
        position += size;
    }
    return 0;
}

static PyObject *prefix_keys(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    if (given != 2 || !PyList_CheckExact(args[0]))
        return PyErr_Format(PyExc_TypeError, "a list and a key expected");
    Blocks to = {NULL, NULL, NULL, args[1], 0, 0};
    PyObject *result = NULL, *pieces = PyList_AsTuple(args[0]); /* so that they are the same when they are counted */
    if (pieces != NULL && add_pieces(state_of(module), &to, pieces) == 0) {
        to.keys = PyTuple_New(to.blocks);
        to.edges = PyTuple_New(to.blocks);
        to.ends = PyTuple_New(to.pieces);
        if (to.keys != NULL && to.edges != NULL && to.ends != NULL && add_pieces(state_of(module), &to, pieces) == 0)
            result = PyTuple_Pack(3, to.keys, to.edges, to.ends);
        Py_XDECREF(to.keys);
        Py_XDECREF(to.edges);
        Py_XDECREF(to.ends);
    }
    Py_XDECREF(pieces);
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
static char *write_value(char *at, const char *end, PyObject *value)
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
    if (given != 2 || !PyBytes_CheckExact(args[0]) || !PyList_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "bytes and a list expected");
    char line[LONGEST_LINE], *at = line, *end = line + LONGEST_LINE;
    const char *from = PyBytes_AS_STRING(args[0]), *stop = from + PyBytes_GET_SIZE(args[0]), *mark;
    Py_ssize_t place = 0, values = PyList_GET_SIZE(args[1]);
    while (at != NULL && (mark = memchr(from, '%', (size_t)(stop - from))) != NULL) {
        if (mark[1] != 'b' || place == values || mark - from > end - at)
            Py_RETURN_NONE;
        at = (char *)memcpy(at, from, (size_t)(mark - from)) + (mark - from);
        at = write_value(at, end, PyList_GET_ITEM(args[1], place++));
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
    PyObject *xxhash = PyImport_ImportModule("xxhash"), *orjson = PyImport_ImportModule("orjson");
    state->digest = xxhash == NULL ? NULL : PyObject_GetAttrString(xxhash, "xxh3_64_intdigest");
    state->parse = orjson == NULL ? NULL : PyObject_GetAttrString(orjson, "loads");
    Py_XDECREF(xxhash);
    Py_XDECREF(orjson);
    for (size_t place = 0; place < sizeof USUAL / sizeof *USUAL; place++)
        Py_XSETREF(*slot_of(state, USUAL[place], strlen(USUAL[place])), PyUnicode_InternFromString(USUAL[place]));
    state->host = PyBytes_FromString("host");
    state->length = PyBytes_FromString("content-length");
    return PyErr_Occurred() ? -1 : 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = state_of(module);
    Py_VISIT(state->digest);
    Py_VISIT(state->parse);
    return 0;
}

static int clear(PyObject *module)
{
    State *state = state_of(module);
    Py_CLEAR(state->digest);
    Py_CLEAR(state->parse);
    for (int place = 0; place < SLOTS_OF_KEYS; place++)
        Py_CLEAR(state->keys[place]);
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
    FUNCTION(json_object), FUNCTION(whole_request), FUNCTION(event_chunks), FUNCTION(text_turns), FUNCTION(prefix_keys),
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
