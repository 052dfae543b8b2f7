/* A function that is called inside a range. */
#include "ranges.h"

typedef struct {
    PyObject_HEAD
    PyObject *function, *block;
    vectorcallfunc vectorcall;
} Ranged;

static PyObject *Ranged_vectorcall(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    Ranged *self = (Ranged *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags) + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    int begun = begin((Block *)self->block, args, count, NULL);
    if (begun < 0) {
        return NULL;
    }
    PyObject *outputs = PyObject_Vectorcall(self->function, args, flags, names);
    if (begun == 0) {
        return outputs;
    }
    SavedError raised = {NULL, NULL, NULL};
    if (outputs == NULL) {
        raised = save_error();
    }
    if (end((Block *)self->block, outputs == NULL ? Py_None : outputs) < 0) {
        if (outputs == NULL) {
            PyErr_Clear();
        }
        Py_CLEAR(outputs);
    }
    restore_error(raised);
    return outputs;
}

static int Ranged_traverse(Ranged *self, visitproc visit, void *arg) {
    Py_VISIT(self->function);
    Py_VISIT(self->block);
    return 0;
}

static int Ranged_clear(Ranged *self) {
    Py_CLEAR(self->function);
    Py_CLEAR(self->block);
    return 0;
}

static void Ranged_dealloc(Ranged *self) {
    PyObject_GC_UnTrack(self);
    Ranged_clear(self);
    Py_TYPE(self)->tp_free(self);
}

PyTypeObject RangedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nvprof_kit._instrument.ranges._ranges.Ranged",
    .tp_doc = "A function that is called inside a block.",
    .tp_basicsize = sizeof(Ranged),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Ranged, vectorcall),
    .tp_dealloc = (destructor)Ranged_dealloc,
    .tp_traverse = (traverseproc)Ranged_traverse,
    .tp_clear = (inquiry)Ranged_clear,
};

PyObject *ranged(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *function, *block;
    if (!PyArg_ParseTuple(args, "OO!", &function, &BlockType, &block)) {
        return NULL;
    }
    Ranged *self = (Ranged *)RangedType.tp_alloc(&RangedType, 0);
    if (self != NULL) {
        self->function = Py_NewRef(function);
        self->block = Py_NewRef(block);
        self->vectorcall = Ranged_vectorcall;
    }
    return (PyObject *)self;
}
