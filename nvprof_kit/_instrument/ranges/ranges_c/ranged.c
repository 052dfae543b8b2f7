/* A function that is called inside a range. */
#include "ranges.h"

typedef struct {
    PyObject_HEAD
    PyObject *function, *block;
    vectorcallfunc vectorcall;
} Ranged;

/* End the call; `serial` counts the changes of the receiver before it began. */
static int end_call_at(const Context *context, uint64_t serial, Block *block, PyObject *outputs) {
    return serial == now.serial ? end_at(context, block, outputs) : end(block, outputs);
}

static PyObject *Ranged_vectorcall(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    Ranged *self = (Ranged *)object;
    Block *block = (Block *)self->block;
    Py_ssize_t count = PyVectorcall_NARGS(flags) + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    uint64_t serial = now.serial;
    Context context;
    if (now.backend == NULL) {
        return PyObject_Vectorcall(self->function, args, flags, names);
    }
    if (get_context(&context) < 0) {
        return NULL;
    }
    if (begin_at(&context, block, args, count, NULL) < 0) {
        release_context(&context);
        return NULL;
    }
    PyObject *outputs = call_fast(self->function, args, flags, names);
    SavedError raised = {NULL, NULL, NULL};
    if (outputs == NULL) {
        raised = save_error();
    }
    if (end_call_at(&context, serial, block, outputs == NULL ? Py_None : outputs) < 0) {
        if (outputs == NULL) {
            PyErr_Clear();
        }
        Py_CLEAR(outputs);
    }
    release_context(&context);
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

static PyMemberDef Ranged_members[] = {MEMBER(Ranged, function, READONLY), {NULL}};

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
    .tp_members = Ranged_members,
};

/* What torch.compile takes for the call and inlines: the function, as a compiled graph has no ranges. Python itself calls
 * through the slots of the type. With this, the forwarder of a decorated function need not ask whether it is compiled,
 * which takes 20 ns. */
static const char traced[] = "lambda self, /, *args, **kwargs: self.function(*args, **kwargs)";

static PyObject *traced_call(void) {
    PyObject *globals = PyDict_New(), *call = NULL;
    PyObject *code = Py_CompileString(traced, "<compiled range>", Py_eval_input);
    if (code != NULL && globals != NULL && PyDict_SetItemString(globals, "__builtins__", PyEval_GetBuiltins()) == 0) {
        call = PyEval_EvalCode(code, globals, globals);
    }
    Py_XDECREF(code);
    Py_XDECREF(globals);
    return call;
}

int ready_ranged(void) {
    if (RangedType.tp_dict != NULL) { /* the module is imported anew */
        return 0;
    }
    PyObject *call = traced_call(), *slots = PyTuple_New(0), *dict = PyDict_New();
    int done = call == NULL || slots == NULL || dict == NULL ? -1 : PyDict_SetItemString(dict, "__call__", call);
    if (done == 0) {
        done = PyDict_SetItemString(dict, "__slots__", slots); /* PyTorch 2.4 then looks at `function` */
    }
    Py_XDECREF(call);
    Py_XDECREF(slots);
    if (done < 0) {
        Py_XDECREF(dict);
        return -1;
    }
    RangedType.tp_dict = dict;
    return PyType_Ready(&RangedType);
}

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
