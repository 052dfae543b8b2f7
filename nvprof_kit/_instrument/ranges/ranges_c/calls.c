/* Calls of functions that are called at each range. */
#include "ranges.h"

typedef PyObject *(*Fast)(PyObject *, PyObject *const *, Py_ssize_t);
typedef PyObject *(*FastWithKeywords)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);

static PyObject *no_arguments; /* the empty tuple */

void set_query(Query *query, PyObject *function) {
    static const int known[] = {METH_NOARGS, METH_VARARGS, METH_VARARGS | METH_KEYWORDS, METH_FASTCALL,
                                METH_FASTCALL | METH_KEYWORDS};
    PyObject *before = query->function;
    *query = (Query){.function = Py_NewRef(function)};
    if (no_arguments == NULL && (no_arguments = PyTuple_New(0)) == NULL) {
        PyErr_Clear();
    } else if (PyCFunction_CheckExact(function)) {
        query->flags = PyCFunction_GET_FLAGS(function);
        for (size_t index = 0; index < sizeof(known) / sizeof(*known); index++) {
            if (query->flags == known[index]) {
                query->direct = PyCFunction_GET_FUNCTION(function);
                query->self = PyCFunction_GET_SELF(function);
            }
        }
    }
    Py_XDECREF(before);
}

static PyObject *call_directly(const Query *query) {
    PyObject *const none[] = {NULL};
    void (*direct)(void) = (void (*)(void))query->direct;
    switch (query->flags) {
    case METH_VARARGS | METH_KEYWORDS:
        return ((PyCFunctionWithKeywords)direct)(query->self, no_arguments, NULL);
    case METH_FASTCALL | METH_KEYWORDS:
        return ((FastWithKeywords)direct)(query->self, none, 0, NULL);
    case METH_FASTCALL:
        return ((Fast)direct)(query->self, none, 0);
    case METH_VARARGS:
        return query->direct(query->self, no_arguments);
    default:
        return query->direct(query->self, NULL);
    }
}

PyObject *call_query(const Query *query) {
    if (query->direct == NULL) {
        return call_held(query->function);
    }
    PyObject *held = Py_NewRef(query->function); /* it may be replaced during the call */
    PyObject *result = call_directly(query);
    Py_DECREF(held);
    return result;
}

static PyTypeObject *partial_type(void) {
    static PyTypeObject *type;
    if (type == NULL) {
        PyObject *module = PyImport_ImportModule("functools");
        type = module == NULL ? NULL : (PyTypeObject *)PyObject_GetAttrString(module, "partial");
        Py_XDECREF(module);
    }
    return type;
}

static int take_apart(PyObject *partial, Parts *parts) {
    PyObject *keywords = PyObject_GetAttrString(partial, "keywords");
    PyObject *function = PyObject_GetAttrString(partial, "func");
    PyObject *arguments = PyObject_GetAttrString(partial, "args");
    if (keywords == NULL || function == NULL || arguments == NULL) {
        Py_XDECREF(keywords);
        Py_XDECREF(function);
        Py_XDECREF(arguments);
        return -1;
    }
    bool whole = PyDict_CheckExact(keywords) && PyDict_GET_SIZE(keywords) == 0 && PyTuple_CheckExact(arguments);
    Py_DECREF(keywords);
    Parts before = *parts;
    *parts = (Parts){Py_NewRef(partial), whole ? Py_NewRef(function) : NULL, whole ? Py_NewRef(arguments) : NULL};
    Py_DECREF(function);
    Py_DECREF(arguments);
    Py_XDECREF(before.of);
    Py_XDECREF(before.function);
    Py_XDECREF(before.arguments);
    return 0;
}

PyObject *call_partial(PyObject *callable, Parts *parts) {
    if (parts->of != callable) {
        PyTypeObject *type = partial_type();
        if (type == NULL) {
            return NULL;
        }
        if (!Py_IS_TYPE(callable, type)) {
            return call_held(callable);
        }
        if (take_apart(callable, parts) < 0) {
            return NULL;
        }
    }
    if (parts->of != callable || parts->function == NULL) { /* replaced again, by the destructor of the one before */
        return call_held(callable);
    }
    PyObject *function = Py_NewRef(parts->function), *arguments = Py_NewRef(parts->arguments);
    PyObject *result =
        call_fast(function, PySequence_Fast_ITEMS(arguments), (size_t)PyTuple_GET_SIZE(arguments), NULL);
    Py_DECREF(function);
    Py_DECREF(arguments);
    return result;
}
