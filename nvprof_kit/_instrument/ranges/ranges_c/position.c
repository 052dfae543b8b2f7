/* State of a thread: its open ranges, and its position in the backward pass. */
#include "ranges.h"

/* Recent results of `current_position`, borrowed, by the thread state's id, which no other thread state ever has: valid for the
 * same receiver, while no Position has been freed since. Not thread-local: in a shared library that takes longer. */
#define KEPT 8

static struct {
    uint64_t serial, freed, id;
    Position *position;
} kept[KEPT];

static uint64_t freed;

static PyObject *Position_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Position *self = (Position *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->at = (Frame *)Py_NewRef(outside);
        self->number = -2;
    }
    return (PyObject *)self;
}

static int Position_traverse(Position *self, visitproc visit, void *arg) {
    for (Py_ssize_t index = 0; index < self->count; index++) {
        Py_VISIT(self->open[index].owner);
        Py_VISIT(self->open[index].backward);
        Py_VISIT(self->open[index].frame);
        Py_VISIT(self->open[index].given);
    }
    Py_VISIT(self->task);
    Py_VISIT(self->at);
    return 0;
}

static void drop(Position *self) {
    Open top = self->open[--self->count];
    Py_XDECREF(top.frame);
    Py_XDECREF(top.backward);
    Py_XDECREF(top.given);
    Py_DECREF(top.owner);
}

static int Position_clear(Position *self) {
    while (self->count > 0) {
        drop(self);
    }
    Py_CLEAR(self->task);
    Py_XSETREF(self->at, (Frame *)Py_NewRef(outside));
    return 0;
}

static void Position_dealloc(Position *self) {
    PyObject_GC_UnTrack(self);
    freed++; /* before any call that may run Python code */
    Position_clear(self);
    Py_CLEAR(self->at);
    PyMem_Free(self->open);
    Py_TYPE(self)->tp_free(self);
}

static int add(Position *self, PyObject *owner) {
    if (self->count == self->room) {
        Py_ssize_t room = self->room == 0 ? 32 : 2 * self->room;
        Open *open = PyMem_Realloc(self->open, (size_t)room * sizeof(Open));
        if (open == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->open = open;
        self->room = room;
    }
    self->open[self->count++] = (Open){.owner = Py_NewRef(owner)};
    return 0;
}

Py_ssize_t find(const Position *self, PyObject *owner) {
    Py_ssize_t index = self->count - 1;
    while (index >= 0 && self->open[index].owner != owner) {
        index--;
    }
    return index;
}

static Parts pops; /* of the last pop that is a partial */

static int close_from(Position *self, Py_ssize_t index, PyObject *pop) {
    int done = 0;
    Py_INCREF(pop);
    while (done == 0 && self->count > index) {
        drop(self);
        done = drop_result(call_partial(pop, &pops));
    }
    Py_DECREF(pop);
    return done;
}

int close_owner(const Context *context, PyObject *owner) {
    Py_ssize_t index = find(context->position, owner);
    return index < 0 ? 0 : close_from(context->position, index, context->pop);
}

static PyObject *Position_add(Position *self, PyObject *owner) {
    return add(self, owner) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *Position_close(Position *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "close() takes an owner and a pop");
        return NULL;
    }
    Py_ssize_t index = find(self, args[0]);
    return index >= 0 && close_from(self, index, args[1]) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *Position_close_all(Position *self, PyObject *pop) {
    return close_from(self, 0, pop) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *Position_owners(Position *self, void *Py_UNUSED(closure)) {
    PyObject *owners = PyList_New(0); /* not preallocated: a garbage collection may close ranges */
    for (Py_ssize_t index = 0; owners != NULL && index < self->count; index++) {
        PyObject *owner = Py_NewRef(self->open[index].owner);
        if (PyList_Append(owners, owner) < 0) {
            Py_CLEAR(owners);
        }
        Py_DECREF(owner);
    }
    return owners;
}

static PyObject *Position_at(Position *self, void *Py_UNUSED(closure)) { return Py_NewRef(self->at); }

static int Position_set_at(Position *self, PyObject *at, void *Py_UNUSED(closure)) {
    if (at == NULL || !Py_IS_TYPE(at, &FrameType)) {
        PyErr_SetString(PyExc_TypeError, "a thread is at a frame");
        return -1;
    }
    Py_SETREF(self->at, (Frame *)Py_NewRef(at));
    return 0;
}

static PyMemberDef Position_members[] = {
    MEMBER(Position, task, 0),
    {"number", T_LONGLONG, offsetof(Position, number), 0, NULL},
    {NULL},
};

static PyGetSetDef Position_getset[] = {
    {"owners", (getter)Position_owners, NULL, NULL, NULL},
    {"at", (getter)Position_at, (setter)Position_set_at, NULL, NULL},
    {NULL},
};

static PyMethodDef Position_methods[] = {
    {"add", (PyCFunction)Position_add, METH_O, NULL},
    {"close", (PyCFunction)(void (*)(void))Position_close, METH_FASTCALL, NULL},
    {"close_all", (PyCFunction)Position_close_all, METH_O, NULL},
    {NULL},
};

PyTypeObject PositionType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nvprof_kit._instrument.ranges._ranges.Position",
    .tp_doc = "Where a thread is.",
    .tp_basicsize = sizeof(Position),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Position_new,
    .tp_dealloc = (destructor)Position_dealloc,
    .tp_traverse = (traverseproc)Position_traverse,
    .tp_clear = (inquiry)Position_clear,
    .tp_members = Position_members,
    .tp_getset = Position_getset,
    .tp_methods = Position_methods,
};

/* How often the thread holds the GIL, one hold within the other; 0 if unknown. */
static int holds_of(const PyThreadState *thread) {
#if PY_VERSION_HEX < 0x030E0000
    return thread->gilstate_counter;
#else
    (void)thread;
    return 0;
#endif
}

/* PyTorch releases the GIL before it runs a backward pass, and whatever it then runs in Python holds the GIL anew, in
 * the hold of the caller. So the thread's outermost level is inside a backward pass either always (a thread that the
 * engine started) or never, and PyTorch is asked there only once. */
int ask_recomputes(Position *self, const PyThreadState *thread) {
    bool outermost = holds_of(thread) == 1 && answers.task.direct != NULL;
    long long task;
    if (outermost && self->outermost == thread->id) {
        return 0;
    }
    if (ask_task(&task) < 0) {
        return -1;
    }
    if (outermost && task == -1) {
        self->outermost = thread->id;
    }
    return task != -1;
}

/* The calling thread's `backend.thread.position`, a new reference. */
static Position *current_position(const PyThreadState *thread) {
    uint64_t id = thread->id, serial = now.serial;
    size_t slot = (size_t)(id % KEPT);
    if (kept[slot].position != NULL && kept[slot].id == id && kept[slot].serial == serial && kept[slot].freed == freed) {
        return (Position *)Py_NewRef(kept[slot].position);
    }
    PyObject *holder = Py_NewRef(now.thread);
    PyObject *position = PyObject_GetAttr(holder, names.position);
    Py_DECREF(holder);
    if (position != NULL && !Py_IS_TYPE(position, &PositionType)) {
        PyErr_SetString(PyExc_TypeError, "backend.thread.position is no Position");
        Py_CLEAR(position);
    }
    kept[slot].position = now.local ? (Position *)position : NULL;
    kept[slot].serial = serial;
    kept[slot].freed = freed;
    kept[slot].id = id;
    return (Position *)position;
}

int get_context(Context *context) {
    *context = (Context){Py_NewRef(now.backend), Py_NewRef(now.pop), NULL, PyThreadState_Get()};
    context->position = current_position(context->thread);
    if (context->position == NULL) {
        release_context(context);
        return -1;
    }
    return 0;
}

void release_context(Context *context) {
    Py_DECREF(context->backend);
    Py_DECREF(context->pop);
    Py_XDECREF(context->position);
}

int open_range(const Context *context, PyObject *object, PyObject *owner) {
    if (object == NULL || !Py_IS_TYPE(object, &RangeType)) {
        PyErr_SetString(PyExc_TypeError, "what is opened must be a Range");
        return -1;
    }
    Range *range = (Range *)object;
    if (range->backend != context->backend &&
        drop_result(PyObject_CallMethodOneArg(context->backend, names.prepare, object)) < 0) {
        return -1;
    }
    if (range->push == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a range is opened that no backend prepared");
        return -1;
    }
    return drop_result(call_partial(range->push, &range->parts)) < 0 ? -1 : add(context->position, owner);
}

/* Create the frame of a call among the open ranges, and those of the enclosing calls. */
Frame *frame_at(Position *position, Py_ssize_t index) {
    while (index >= 0 && !position->open[index].follows) {
        index--;
    }
    if (index < 0) {
        return (Frame *)Py_NewRef(outside);
    }
    Open call = position->open[index];
    if (call.frame != NULL) {
        return (Frame *)Py_NewRef(call.frame);
    }
    Py_INCREF(call.owner); /* an allocation may trigger a garbage collection that closes the call */
    Py_INCREF(call.backward);
    Py_XINCREF(call.given);
    Frame *outer = frame_at(position, index - 1);
    if (outer != NULL && (outer == outside || add_edge(outer, call.begin) == 0)) {
        PyObject *given = outer == outside ? call.given : outer->given;
        call.frame = Frame_new(call.owner, call.backward, outer, call.begin, given);
    }
    Py_XDECREF(outer);
    Open *open = &position->open[index];
    if (call.frame != NULL && index < position->count && open->owner == call.owner && open->frame == NULL) {
        open->frame = (Frame *)Py_NewRef(call.frame);
    }
    Py_XDECREF(call.given);
    Py_DECREF(call.backward);
    Py_DECREF(call.owner);
    return call.frame;
}

static void set_at(Position *position, Frame *to) { Py_SETREF(position->at, (Frame *)Py_NewRef(to)); }

/* Close the ranges of the thread's current call, and move to the enclosing call. */
static int leave_call(const Context *context) {
    Frame *at = (Frame *)Py_NewRef(context->position->at);
    int done = close_owner(context, (PyObject *)at);
    if (done == 0) {
        set_at(context->position, at->parent);
    }
    Py_DECREF(at);
    return done;
}

/* Close the ranges of completed calls and open those of beginning calls, up to the target. */
static int go_to(const Context *context, Frame *target) {
    Position *position = context->position;
    while (position->at != target && position->at->depth >= target->depth && position->at->parent != NULL) {
        if (leave_call(context) < 0) {
            return -1;
        }
    }
    if (position->at == target || target->parent == NULL) {
        return 0;
    }
    if (go_to(context, target->parent) < 0 || open_range(context, target->backward, (PyObject *)target) < 0) {
        return -1;
    }
    set_at(position, target);
    return 0;
}

PyObject *Frame_reach(Frame *self, PyObject *Py_UNUSED(grads)) {
    long long task;
    Context context;
    if (now.backend == NULL) {
        Py_RETURN_NONE;
    }
    if (get_context(&context) < 0) {
        return NULL;
    }
    int done = ask_task(&task);
    if (done == 0 && task != context.position->number && answers.begin_task != NULL) {
        done = drop_result(call_held(answers.begin_task));
    }
    if (done == 0) {
        done = go_to(&context, self);
    }
    release_context(&context);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}
