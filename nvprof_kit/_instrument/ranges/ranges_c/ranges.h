/* Ranges, calls of layers and their backward pass: ranges_python.py and frames_python.py in C.
 *
 * Those modules explain the design; names and order of operations are the same. Rare cases stay in Python. A call into
 * Python may reenter this code, so objects in use are referenced, and lists are read again afterwards. Functions that
 * return int return -1 with an error set.
 */
#ifndef NVPROF_KIT_RANGES_H
#define NVPROF_KIT_RANGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "the lists of open ranges rely on the GIL"
#endif

#define INTERFACE 6 /* as in ranges_python.py */
#define MEMBER(type, name, flags) {#name, T_OBJECT, offsetof(type, name), flags, NULL}

/* module.c: the current receiver of ranges, or NULL; `local`: each thread sets its own `thread.position`; `serial`: counts
 * changes of the receiver. Also names of attributes. */
extern struct Now {
    PyObject *backend, *thread, *pop;
    bool local;
    uint64_t serial;
} now;

extern struct Names {
    PyObject *position, *prepare, *thread, *pop, *grad_fn, *base, *sequence_nr, *metadata, *register_prehook,
        *next_functions, *left;
} names;

/* calls.c: calls of functions that are called at each range, without the layers between. */

/* PyObject_Vectorcall without its check of the result, which is for faulty extensions. */
static inline PyObject *call_fast(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    PyTypeObject *type = Py_TYPE(callable);
    vectorcallfunc call = NULL;
    if (PyType_HasFeature(type, Py_TPFLAGS_HAVE_VECTORCALL)) {
        memcpy(&call, (char *)callable + type->tp_vectorcall_offset, sizeof(call));
    }
    return call == NULL ? PyObject_Vectorcall(callable, args, flags, names) : call(callable, args, flags, names);
}

/* A function without arguments. `direct` is what a builtin function consists of, NULL for other callables. */
typedef struct {
    PyObject *function, *self;
    PyCFunction direct;
    int flags;
} Query;

void set_query(Query *query, PyObject *function);
PyObject *call_query(const Query *query);

/* The parts of a functools.partial without keywords. */
typedef struct {
    PyObject *of, *function, *arguments;
} Parts;

PyObject *call_partial(PyObject *callable, Parts *parts); /* parts of an earlier call; changed if of another partial */

/* answers.c: queries about the calling thread, and what following the backward pass needs, which is NULL until torch is
 * loaded. */
extern struct Answers {
    Query task, grad, sequence;
    bool (*grad_mode)(void); /* the same as `grad`, by PyTorch's C interface; NULL if it has none */
    PyObject *begin_task, *grad_nodes, *plain;
    PyTypeObject *tensor, *parameter;
} answers;

int ask_task(long long *task);
int ask_sequence(uint64_t *sequence);
int ask_grad(void);

/* An error that is saved during another call. */
typedef struct {
    PyObject *kind, *error, *traceback;
} SavedError;

SavedError save_error(void);
void restore_error(SavedError raised); /* replaces an error raised since, if one was saved */
int drop_result(PyObject *result); /* drop the result of a call; -1 if it is NULL */
PyObject *call_held(PyObject *function); /* call a function that may be replaced during the call */
PyObject *call_held_with(PyObject *function, PyObject *argument);

/* nodes.c: add the autograd nodes of the tensors in a value to a list, created when needed. */
int add_nodes(PyObject *value, PyObject **nodes);
void forget_plain(void); /* after `answers.plain` changed */
bool has_no_tensors(PyObject *value); /* true for None, numbers and text; false means that it may have some */

/* frames.c: one call of a layer, for the backward pass. */
#define FEW 8

typedef struct Frame {
    PyObject_HEAD
    PyObject *layer, *backward;
    struct Frame *parent; /* NULL: the root frame */
    Py_ssize_t depth;
    uint64_t *edges, few[FEW];
    Py_ssize_t count, room;
    PyObject *seen, *marked; /* sets, created when needed */
    PyObject *given;         /* nodes by identity, or NULL */
} Frame;

extern PyTypeObject FrameType;
extern Frame *outside;

Frame *Frame_new(PyObject *layer, PyObject *backward, Frame *parent, uint64_t begin, PyObject *given);
PyObject *Frame_reach(Frame *self, PyObject *grads); /* position.c */
PyObject *reach_of(Frame *self);
int add_edge(Frame *self, uint64_t number);
int end_frame(Frame *self, PyObject *nodes, uint64_t sequence);

/* marks.c: mark where the backward pass, arriving at these nodes, enters the call's own nodes. */
int mark(Frame *self, PyObject *nodes, bool ends);
PyObject *by_identity(PyObject *nodes);
int has_made_any(PyObject *nodes, uint64_t begin, PyObject *given); /* whether a call that began there made any of them */
int has_left(PyObject *node, bool leaves); /* whether it left an outermost call; with `leaves`, record that it has */

/* position.c: state of a thread. */
typedef struct {
    PyObject *owner, *backward;
    Frame *frame; /* of a followed call, created when needed */
    PyObject *given; /* of an outermost call: the nodes of its arguments, by identity, or NULL */
    uint64_t begin;
    bool follows;
} Open;

typedef struct {
    PyObject_HEAD
    Open *open;
    Py_ssize_t count, room;
    PyObject *task;
    Frame *at;
    long long number;
    uint64_t outermost; /* id of the thread state that was outside of every backward pass at its outermost level */
} Position;

extern PyTypeObject PositionType;

int ask_recomputes(Position *self, const PyThreadState *thread); /* whether a backward pass runs on the calling thread */

/* The receiver of ranges and the state of the calling thread; referenced, as Python code may change the receiver. */
typedef struct {
    PyObject *backend, *pop;
    Position *position;
    const PyThreadState *thread;
} Context;

int get_context(Context *context); /* valid only while ranges are emitted */
void release_context(Context *context);
int open_range(const Context *context, PyObject *range, PyObject *owner);
int close_owner(const Context *context, PyObject *owner);
Py_ssize_t find(const Position *self, PyObject *owner);
Frame *frame_at(Position *self, Py_ssize_t index); /* of the innermost followed call at or outside index, a new reference */

/* blocks.c, ranges.c and module.c */
typedef struct {
    PyObject_HEAD
    PyObject *text, *category, *payload, *backend, *push;
    Parts parts; /* of push */
} Range;

typedef struct {
    PyObject_HEAD
    PyObject *range, *recompute, *backward, *owner; /* owner is NULL for the block itself, to avoid a cycle */
} Block;

extern PyTypeObject RangeType, BlockType, RangedType;

int begin_at(const Context *context, Block *self, PyObject *const *values, Py_ssize_t count, PyObject *more);
int end_at(const Context *context, Block *self, PyObject *outputs);
int end(Block *self, PyObject *outputs);
int ready_ranged(void); /* set up its type */
PyObject *ranged(PyObject *module, PyObject *args);

#endif
