/* One call of a layer, for the backward pass. */
#include "ranges.h"

Frame *outside;

Frame *Frame_new(PyObject *layer, PyObject *backward, Frame *parent, uint64_t begin, PyObject *given) {
    Frame *self = PyObject_GC_New(Frame, &FrameType);
    if (self == NULL) {
        return NULL;
    }
    self->layer = Py_XNewRef(layer);
    self->backward = Py_XNewRef(backward);
    self->parent = (Frame *)Py_XNewRef(parent);
    self->depth = parent == NULL ? 0 : parent->depth + 1;
    self->edges = self->few;
    self->edges[0] = begin;
    self->count = 1;
    self->room = FEW;
    self->seen = self->marked = NULL;
    self->given = Py_XNewRef(given);
    PyObject_GC_Track(self);
    return self;
}

static int Frame_traverse(Frame *self, visitproc visit, void *arg) {
    Py_VISIT(self->layer);
    Py_VISIT(self->backward);
    Py_VISIT(self->parent);
    Py_VISIT(self->given);
    return 0;
}

static int Frame_clear(Frame *self) {
    Py_CLEAR(self->layer);
    Py_CLEAR(self->backward);
    Py_CLEAR(self->seen);
    Py_CLEAR(self->marked);
    Py_CLEAR(self->given);
    return 0;
}

static void Frame_dealloc(Frame *self) {
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, Frame_dealloc);
    Frame_clear(self);
    Py_CLEAR(self->parent);
    if (self->edges != self->few) {
        PyMem_Free(self->edges);
    }
    PyObject_GC_Del(self);
    Py_TRASHCAN_END;
}

int add_edge(Frame *self, uint64_t number) {
    if (self->count == self->room) {
        uint64_t *old = self->edges == self->few ? NULL : self->edges;
        uint64_t *edges = PyMem_Realloc(old, 2 * (size_t)self->room * sizeof(uint64_t));
        if (edges == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (old == NULL) {
            memcpy(edges, self->few, sizeof(self->few));
        }
        self->edges = edges;
        self->room *= 2;
    }
    self->edges[self->count++] = number;
    return 0;
}

int end_frame(Frame *self, PyObject *nodes, uint64_t sequence) {
    if (mark(self, nodes, true) < 0) {
        return -1;
    }
    Py_CLEAR(self->seen);
    Py_CLEAR(self->marked);
    Py_CLEAR(self->given);
    if (self->parent != outside) {
        return add_edge(self->parent, sequence);
    }
    for (Py_ssize_t index = 0; nodes != NULL && index < PyList_GET_SIZE(nodes); index++) {
        PyObject *node = Py_NewRef(PyList_GET_ITEM(nodes, index));
        int left = has_left(node, true);
        Py_DECREF(node);
        if (left < 0) {
            return -1;
        }
    }
    return 0;
}

static PyMemberDef Frame_members[] = {
    MEMBER(Frame, layer, READONLY),
    MEMBER(Frame, backward, READONLY),
    {"depth", T_PYSSIZET, offsetof(Frame, depth), READONLY, NULL},
    {NULL},
};

static PyObject *Frame_parent(Frame *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(self->parent == NULL ? self : self->parent);
}

static PyGetSetDef Frame_getset[] = {{"parent", (getter)Frame_parent, NULL, NULL, NULL}, {NULL}};
static PyMethodDef Frame_methods[] = {{"reach", (PyCFunction)Frame_reach, METH_O, NULL}, {NULL}};

PyObject *reach_of(Frame *self) { return PyCFunction_New(Frame_methods, (PyObject *)self); }

PyTypeObject FrameType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nvprof_kit._instrument.ranges._ranges.Frame",
    .tp_doc = "One call of a layer, as the backward pass needs it.",
    .tp_basicsize = sizeof(Frame),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_dealloc = (destructor)Frame_dealloc,
    .tp_traverse = (traverseproc)Frame_traverse,
    .tp_clear = (inquiry)Frame_clear,
    .tp_members = Frame_members,
    .tp_getset = Frame_getset,
    .tp_methods = Frame_methods,
};
