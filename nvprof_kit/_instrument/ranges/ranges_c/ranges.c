/* One range: its attributes are built once, and it can be opened many times. */
#include "ranges.h"

/* The text with characters that UTF-8 cannot encode replaced: see names.encodable. */
static PyObject *encodable(PyObject *text) {
    if (!PyUnicode_Check(text) || PyUnicode_IS_ASCII(text)) {
        return Py_NewRef(text);
    }
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "xmlcharrefreplace");
    PyObject *found = bytes == NULL ? NULL : PyUnicode_FromEncodedObject(bytes, "utf-8", "strict");
    Py_XDECREF(bytes);
    return found;
}

static int Range_init(Range *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"text", "category", "payload", NULL};
    PyObject *text, *category, *payload = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O", names, &text, &category, &payload)) {
        return -1;
    }
    if ((text = encodable(text)) == NULL) {
        return -1;
    }
    Py_XSETREF(self->text, text);
    Py_XSETREF(self->category, Py_NewRef(category));
    Py_XSETREF(self->payload, Py_NewRef(payload));
    Py_CLEAR(self->backend);
    Py_CLEAR(self->push);
    Py_CLEAR(self->parts.of);
    Py_CLEAR(self->parts.function);
    Py_CLEAR(self->parts.arguments);
    return 0;
}

static int Range_traverse(Range *self, visitproc visit, void *arg) {
    Py_VISIT(self->text);
    Py_VISIT(self->category);
    Py_VISIT(self->payload);
    Py_VISIT(self->backend);
    Py_VISIT(self->push);
    Py_VISIT(self->parts.of);
    Py_VISIT(self->parts.function);
    Py_VISIT(self->parts.arguments);
    return 0;
}

static int Range_clear(Range *self) {
    Py_CLEAR(self->text);
    Py_CLEAR(self->category);
    Py_CLEAR(self->payload);
    Py_CLEAR(self->backend);
    Py_CLEAR(self->push);
    Py_CLEAR(self->parts.of);
    Py_CLEAR(self->parts.function);
    Py_CLEAR(self->parts.arguments);
    return 0;
}

static void Range_dealloc(Range *self) {
    PyObject_GC_UnTrack(self);
    Range_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *none_for_null(PyObject *object) { return object == NULL ? Py_None : object; }

static PyObject *Range_reduce(Range *self, PyObject *Py_UNUSED(ignored)) {
    return Py_BuildValue("O(OOO)", &RangeType, none_for_null(self->text), none_for_null(self->category),
                         none_for_null(self->payload));
}

static PyObject *Range_repr(Range *self) {
    return PyUnicode_FromFormat("Range(%R, %R)", none_for_null(self->text), none_for_null(self->category));
}

static PyMemberDef Range_members[] = {
    MEMBER(Range, text, 0),    MEMBER(Range, category, 0), MEMBER(Range, payload, 0),
    MEMBER(Range, backend, 0), MEMBER(Range, push, 0),     {NULL},
};

static PyMethodDef Range_methods[] = {{"__reduce__", (PyCFunction)Range_reduce, METH_NOARGS, NULL}, {NULL}};

PyTypeObject RangeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nvprof_kit._instrument.ranges.ranges.Range",
    .tp_doc = "One name that a program can be in, built once and opened many times.",
    .tp_basicsize = sizeof(Range),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Range_init,
    .tp_dealloc = (destructor)Range_dealloc,
    .tp_traverse = (traverseproc)Range_traverse,
    .tp_clear = (inquiry)Range_clear,
    .tp_repr = (reprfunc)Range_repr,
    .tp_members = Range_members,
    .tp_methods = Range_methods,
};
