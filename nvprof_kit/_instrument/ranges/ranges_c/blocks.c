/* A range around a with block or around calls; reusable and reentrant. */
#include "ranges.h"

static PyObject *owner_of(Block *self) { return self->owner == NULL ? (PyObject *)self : self->owner; }

static int Block_init(Block *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"range_", "recompute", "backward", "owner", NULL};
    PyObject *range, *recompute = Py_None, *backward = Py_None, *owner = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|OOO", names, &RangeType, &range, &recompute, &backward,
                                     &owner)) {
        return -1;
    }
    Py_XSETREF(self->range, Py_NewRef(range));
    Py_XSETREF(self->recompute, Py_NewRef(recompute == Py_None ? range : recompute));
    Py_XSETREF(self->backward, Py_NewRef(backward));
    Py_XSETREF(self->owner, owner == Py_None ? NULL : Py_NewRef(owner));
    return 0;
}

static int Block_traverse(Block *self, visitproc visit, void *arg) {
    Py_VISIT(self->range);
    Py_VISIT(self->recompute);
    Py_VISIT(self->backward);
    Py_VISIT(self->owner);
    return 0;
}

static int Block_clear(Block *self) {
    Py_CLEAR(self->range);
    Py_CLEAR(self->recompute);
    Py_CLEAR(self->backward);
    Py_CLEAR(self->owner);
    return 0;
}

static void Block_dealloc(Block *self) {
    PyObject_GC_UnTrack(self);
    Block_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Open the block's range; returns 1 if a running backward pass makes it a recompute. */
static int open_block(const Context *context, Block *self) {
    int recomputes = self->recompute == self->range ? 0 : ask_recomputes(context->position, context->thread);
    if (recomputes < 0) {
        return -1;
    }
    PyObject *range = Py_XNewRef(recomputes ? self->recompute : self->range), *owner = Py_NewRef(owner_of(self));
    int done = open_range(context, range, owner);
    Py_DECREF(owner);
    Py_XDECREF(range);
    return done < 0 ? -1 : recomputes;
}

static int enter(Block *self) {
    Context context;
    if (now.backend == NULL) {
        return 0;
    }
    if (get_context(&context) < 0) {
        return -1;
    }
    int done = open_block(&context, self);
    release_context(&context);
    return done;
}

static PyObject *Block_enter(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    return enter((Block *)self) < 0 ? NULL : Py_NewRef(self);
}

static int leave(Block *self) {
    Context context;
    if (now.backend == NULL) {
        return 0;
    }
    if (get_context(&context) < 0) {
        return -1;
    }
    int done = close_owner(&context, owner_of(self));
    release_context(&context);
    return done;
}

static PyObject *Block_exit(PyObject *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count)) {
    return leave((Block *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static int follow_call(Position *position, Block *self, PyObject *const *values, Py_ssize_t count, PyObject *more,
                       bool recomputes) {
    PyObject *nodes = NULL, *given = NULL, *value;
    Py_ssize_t entry = 0;
    int done = 0;
    for (Py_ssize_t index = 0; done == 0 && index < count; index++) {
        done = add_nodes(values[index], &nodes);
    }
    while (done == 0 && more != NULL && PyDict_Next(more, &entry, NULL, &value)) {
        Py_INCREF(value);
        done = add_nodes(value, &nodes);
        Py_DECREF(value);
    }
    if (done == 0 && nodes != NULL && PyList_GET_SIZE(nodes) > 0) {
        Frame *outer = frame_at(position, position->count - 1);
        if (outer == NULL) {
            done = -1;
        } else if (!(recomputes && outer == outside)) { /* else they belong to the graph that is run backward */
            done = mark(outer, nodes, false);
        }
        if (done == 0 && outer == outside && (given = by_identity(nodes)) == NULL) {
            done = -1;
        }
        Py_XDECREF(outer);
    }
    Py_XDECREF(nodes);
    uint64_t begin = 0;
    if (done == 0 && (done = ask_sequence(&begin)) == 0) {
        Py_ssize_t index = find(position, owner_of(self));
        if (index >= 0) {
            Open *open = &position->open[index];
            PyObject *before[] = {open->backward, open->given};
            open->begin = begin;
            open->follows = true;
            open->backward = Py_NewRef(self->backward);
            open->given = Py_XNewRef(given);
            Py_XDECREF(before[0]); /* its destructor may run Python and change the open ranges */
            Py_XDECREF(before[1]);
        }
    }
    Py_XDECREF(given);
    return done;
}

/* The owner's innermost range, if it belongs to a followed call. */
static Open *followed(Position *position, PyObject *owner) {
    Py_ssize_t index = find(position, owner);
    return index < 0 || !position->open[index].follows ? NULL : &position->open[index];
}

/* Whether no other followed call is around this one, and none with a frame was in it. */
static bool is_alone(const Position *position, const Open *call) {
    bool alone = call->frame == NULL;
    for (const Open *open = position->open; alone && open < call; open++) {
        alone = !open->follows;
    }
    return alone;
}

/* End a call, given the nodes of its outputs if they are already known. */
static int end_frame_of(Position *position, const Open *open, PyObject *outputs, PyObject *nodes, uint64_t sequence) {
    PyObject *found = Py_XNewRef(nodes);
    Frame *frame = frame_at(position, open - position->open);
    int done = frame == NULL || (nodes == NULL && add_nodes(outputs, &found) < 0) ? -1 : 0;
    if (done == 0) {
        done = end_frame(frame, found, sequence);
    }
    Py_XDECREF(found);
    Py_XDECREF(frame);
    return done;
}

/* No other call needs to know where this one ended, so PyTorch is not asked. */
static int end_alone(Position *position, Block *self, PyObject *outputs) {
    PyObject *nodes = NULL;
    int done = add_nodes(outputs, &nodes), made = 0;
    Open *open = done < 0 || nodes == NULL ? NULL : followed(position, owner_of(self)); /* Python code may have run */
    if (open != NULL && is_alone(position, open)) {
        PyObject *given = Py_XNewRef(open->given);
        made = has_made_any(nodes, open->begin, given);
        Py_XDECREF(given);
        open = made > 0 ? followed(position, owner_of(self)) : NULL;
        if (open != NULL && is_alone(position, open)) {
            done = end_frame_of(position, open, outputs, nodes, 0);
        }
    }
    Py_XDECREF(nodes);
    return made < 0 ? -1 : done;
}

static int end_call(Position *position, Block *self, PyObject *outputs) {
    uint64_t sequence;
    Open *open = followed(position, owner_of(self));
    if (open == NULL || is_alone(position, open)) {
        return open == NULL ? 0 : end_alone(position, self, outputs);
    }
    if (ask_sequence(&sequence) < 0) {
        return -1;
    }
    open = followed(position, owner_of(self)); /* looked up again: Python code may have run */
    if (open == NULL || (open->frame == NULL && open->begin == sequence)) { /* no autograd node was created in it */
        return 0;
    }
    return end_frame_of(position, open, outputs, NULL, sequence);
}

/* End the block's innermost call; closes its range even on error. */
int end_at(const Context *context, Block *self, PyObject *outputs) {
    SavedError raised = {NULL, NULL, NULL};
    int done = end_call(context->position, self, outputs);
    if (done < 0) {
        raised = save_error();
    }
    if (close_owner(context, owner_of(self)) < 0) {
        done = -1;
    }
    restore_error(raised);
    return done;
}

int end(Block *self, PyObject *outputs) {
    Context context;
    if (now.backend == NULL) {
        return 0;
    }
    if (get_context(&context) < 0) {
        return -1;
    }
    int done = end_at(&context, self, outputs);
    release_context(&context);
    return done;
}

/* Begin a call with these arguments. */
int begin_at(const Context *context, Block *self, PyObject *const *values, Py_ssize_t count, PyObject *more) {
    int recomputes = open_block(context, self);
    int done = recomputes < 0 ? -1 : 0;
    if (done == 0 && self->backward != Py_None && self->backward != NULL && answers.grad_nodes != NULL) {
        int wanted = ask_grad();
        done = wanted <= 0 ? wanted : follow_call(context->position, self, values, count, more, recomputes == 1);
        if (done < 0) {
            SavedError raised = save_error();
            if (end_at(context, self, Py_None) < 0) {
                PyErr_Clear();
            }
            restore_error(raised);
        }
    }
    return done;
}

/* Begin a call on the calling thread; returns 1 if ranges are emitted. */
static int begin(Block *self, PyObject *const *values, Py_ssize_t count, PyObject *more) {
    Context context;
    if (now.backend == NULL) {
        return 0;
    }
    if (get_context(&context) < 0) {
        return -1;
    }
    int done = begin_at(&context, self, values, count, more);
    release_context(&context);
    return done < 0 ? -1 : 1;
}

static PyObject *Block_begin(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "begin() takes a tuple and a dictionary of arguments");
        return NULL;
    }
    PyObject *more = PyDict_GET_SIZE(args[1]) > 0 ? args[1] : NULL;
    int begun = begin((Block *)self, PySequence_Fast_ITEMS(args[0]), PyTuple_GET_SIZE(args[0]), more);
    return begun < 0 ? NULL : PyBool_FromLong(begun);
}

static PyObject *Block_end(PyObject *self, PyObject *outputs) {
    return end((Block *)self, outputs) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMemberDef Block_members[] = {
    MEMBER(Block, range, 0),
    MEMBER(Block, recompute, 0),
    MEMBER(Block, backward, 0),
    {NULL},
};

static PyObject *Block_owner(Block *self, void *Py_UNUSED(closure)) { return Py_NewRef(owner_of(self)); }

static PyGetSetDef Block_getset[] = {{"owner", (getter)Block_owner, NULL, NULL, NULL}, {NULL}};

static PyMethodDef Block_methods[] = {
    {"__enter__", Block_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))Block_exit, METH_FASTCALL, NULL},
    {"begin", (PyCFunction)(void (*)(void))Block_begin, METH_FASTCALL, NULL},
    {"end", Block_end, METH_O, NULL},
    {NULL},
};

PyTypeObject BlockType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nvprof_kit._instrument.ranges._ranges.Block",
    .tp_doc = "A range around a with block or around calls; reusable, and nestable in itself.",
    .tp_basicsize = sizeof(Block),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Block_init,
    .tp_dealloc = (destructor)Block_dealloc,
    .tp_traverse = (traverseproc)Block_traverse,
    .tp_clear = (inquiry)Block_clear,
    .tp_members = Block_members,
    .tp_getset = Block_getset,
    .tp_methods = Block_methods,
};
