/* The autograd nodes of the tensors in a value; tensors.py handles values other than tensors and short tuples. */
#include "ranges.h"

static int add_node(PyObject *tensor, PyObject **nodes) {
    PyObject *node = PyObject_GetAttr(tensor, names.grad_fn);
    if (node == NULL) {
        return -1;
    }
    int done = 0;
    if (node != Py_None) {
        done = *nodes == NULL && (*nodes = PyList_New(0)) == NULL ? -1 : PyList_Append(*nodes, node);
    }
    Py_DECREF(node);
    return done;
}

static int add_tensor(PyObject *tensor, PyObject **nodes) {
    Py_ssize_t before = *nodes == NULL ? 0 : PyList_GET_SIZE(*nodes);
    if (add_node(tensor, nodes) < 0) {
        return -1;
    }
    if (*nodes == NULL || PyList_GET_SIZE(*nodes) == before) {
        return 0;
    }
    PyObject *base = PyObject_GetAttr(tensor, names.base); /* a view's own node may be replaced later */
    if (base == NULL) {
        return -1;
    }
    int done = base == Py_None ? 0 : add_node(base, nodes);
    Py_DECREF(base);
    return done;
}

static bool is_plain(const PyTypeObject *type) {
    return type == Py_TYPE(Py_None) || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
           type == &PyUnicode_Type;
}

bool has_no_tensors(PyObject *value) { return is_plain(Py_TYPE(value)); }

/* Types found in `answers.plain`, by address; borrowed, as that set holds them and only grows. */
#define KNOWN 64

static PyTypeObject *known_plain[KNOWN];

void forget_plain(void) { memset(known_plain, 0, sizeof(known_plain)); }

static int is_known_plain(PyTypeObject *type) {
    PyTypeObject **slot = &known_plain[((uintptr_t)type >> 6) % KNOWN];
    if (*slot == type) {
        return 1;
    }
    PyObject *plain = Py_NewRef(answers.plain); /* a metaclass may hash its classes in Python */
    int found = PySet_Contains(plain, (PyObject *)type);
    if (found == 1 && plain == answers.plain) {
        *slot = type;
    }
    Py_DECREF(plain);
    return found;
}

/* Maximum nesting depth of tuples handled here; deeper ones, which may share elements, are left to tensors.py. */
#define DEEPEST 3

static int add_nodes_in(PyObject *value, PyObject **nodes, int depth) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == answers.tensor || type == answers.parameter) {
        return add_tensor(value, nodes);
    }
    if (is_plain(type)) {
        return 0;
    }
    if (type == &PyTuple_Type && PyTuple_GET_SIZE(value) < 16 && depth < DEEPEST) {
        int done = 0;
        for (Py_ssize_t index = 0; done == 0 && index < PyTuple_GET_SIZE(value); index++) {
            done = add_nodes_in(PyTuple_GET_ITEM(value, index), nodes, depth + 1);
        }
        return done;
    }
    int none = is_known_plain(type);
    if (none != 0) {
        return none < 0 ? -1 : 0;
    }
    PyObject *values = PyList_New(1);
    if (values == NULL) {
        return -1;
    }
    PyList_SET_ITEM(values, 0, Py_NewRef(value));
    PyObject *found = call_held_with(answers.grad_nodes, values);
    Py_DECREF(values);
    int done = found == NULL || (*nodes == NULL && (*nodes = PyList_New(0)) == NULL)
                   ? -1
                   : PyList_SetSlice(*nodes, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, found);
    Py_XDECREF(found);
    return done;
}

int add_nodes(PyObject *value, PyObject **nodes) { return add_nodes_in(value, nodes, 0); }
