/* The extension module, imported by ranges.py. */
#include "ranges.h"

struct Now now;
struct Names names;

/* Whether an object is a threading.local. */
static int is_local(PyObject *thread) {
    PyObject *threads = PyImport_ImportModule("_thread");
    PyObject *type = threads == NULL ? NULL : PyObject_GetAttrString(threads, "_local");
    int local = type == NULL ? -1 : PyObject_IsInstance(thread, type);
    Py_XDECREF(type);
    Py_XDECREF(threads);
    return local;
}

static PyObject *switch_to(PyObject *Py_UNUSED(module), PyObject *backend) {
    PyObject *thread = NULL, *pop = NULL;
    int local = 0;
    if (backend != Py_None) {
        thread = PyObject_GetAttr(backend, names.thread);
        pop = thread == NULL ? NULL : PyObject_GetAttr(backend, names.pop);
        local = pop == NULL ? -1 : is_local(thread);
        if (local < 0) {
            Py_XDECREF(thread);
            Py_XDECREF(pop);
            return NULL;
        }
    }
    PyObject *before[] = {now.backend, now.thread, now.pop};
    now.backend = backend == Py_None ? NULL : Py_NewRef(backend);
    now.thread = thread;
    now.pop = pop;
    now.local = local == 1;
    now.serial++;
    for (int index = 0; index < 3; index++) {
        Py_XDECREF(before[index]);
    }
    Py_RETURN_NONE;
}

static PyObject *ask(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *task, *grad, *sequence;
    unsigned long long grad_mode = 0;
    if (!PyArg_ParseTuple(args, "OOO|K", &task, &grad, &sequence, &grad_mode)) {
        return NULL;
    }
    answers.grad_mode = (bool (*)(void))(uintptr_t)grad_mode;
    set_query(&answers.task, task);
    set_query(&answers.grad, grad);
    set_query(&answers.sequence, sequence);
    Py_RETURN_NONE;
}

static PyObject *follow(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *begins, *nodes, *types, *tensor, *parameter;
    if (!PyArg_ParseTuple(args, "OOO!O!O!", &begins, &nodes, &PySet_Type, &types, &PyType_Type, &tensor, &PyType_Type,
                          &parameter)) {
        return NULL;
    }
    Py_XSETREF(answers.begin_task, Py_NewRef(begins));
    Py_XSETREF(answers.grad_nodes, Py_NewRef(nodes));
    PyObject *before = answers.plain;
    answers.plain = Py_NewRef(types);
    forget_plain();
    Py_XDECREF(before);
    Py_XSETREF(answers.tensor, (PyTypeObject *)Py_NewRef(tensor));
    Py_XSETREF(answers.parameter, (PyTypeObject *)Py_NewRef(parameter));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"switch", switch_to, METH_O, "Ranges go to this backend from now on; None: nowhere."},
    {"ask", ask, METH_VARARGS, "Say what answers questions about the calling thread."},
    {"follow", follow, METH_VARARGS, "Say what else following the backward pass needs."},
    {"ranged", ranged, METH_VARARGS, "A function that calls another inside a block."},
    {NULL},
};

/* Initialize the module. Its state is per process: subinterpreters use the Python implementation. */
static int fill(PyObject *module) {
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "only the main interpreter emits ranges from C");
        return -1;
    }
    static const struct {
        PyObject **string;
        const char *text;
    } strings[] = {
        {&names.position, "position"},
        {&names.prepare, "prepare"},
        {&names.thread, "thread"},
        {&names.pop, "pop"},
        {&names.grad_fn, "grad_fn"},
        {&names.base, "_base"},
        {&names.sequence_nr, "_sequence_nr"},
        {&names.metadata, "metadata"},
        {&names.register_prehook, "register_prehook"},
        {&names.next_functions, "next_functions"},
        {&names.left, "nvprof_kit"},
    };
    for (size_t index = 0; index < sizeof(strings) / sizeof(*strings); index++) {
        if ((*strings[index].string = PyUnicode_InternFromString(strings[index].text)) == NULL) {
            return -1;
        }
    }
    PyTypeObject *types[] = {&RangeType, &FrameType, &PositionType, &BlockType};
    for (size_t index = 0; index < sizeof(types) / sizeof(*types); index++) {
        if (PyType_Ready(types[index]) < 0) {
            return -1;
        }
    }
    if (ready_ranged() < 0) {
        return -1;
    }
    if (outside == NULL && (outside = Frame_new(Py_None, Py_None, NULL, 0, NULL)) == NULL) {
        return -1;
    }
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0 ||
        PyModule_AddObjectRef(module, "OUTSIDE", (PyObject *)outside) < 0 || PyModule_AddType(module, &RangeType) < 0 ||
        PyModule_AddType(module, &FrameType) < 0 || PyModule_AddType(module, &PositionType) < 0 ||
        PyModule_AddType(module, &BlockType) < 0) {
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_ranges",
    .m_doc = "ranges_python in C.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__ranges(void) { return PyModuleDef_Init(&definition); }
