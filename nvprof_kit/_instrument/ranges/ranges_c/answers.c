/* Errors that are kept, and questions about the calling thread. */
#include <dlfcn.h>

#include "ranges.h"

struct Answers answers;

Raised put_by(void) {
    Raised raised;
    PyErr_Fetch(&raised.kind, &raised.error, &raised.traceback);
    return raised;
}

void put_back(Raised raised) {
    if (raised.kind != NULL) {
        PyErr_Restore(raised.kind, raised.error, raised.traceback);
    }
}

int called(PyObject *result) {
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

PyObject *call_held(PyObject *function) {
    Py_INCREF(function);
    PyObject *result = PyObject_CallNoArgs(function);
    Py_DECREF(function);
    return result;
}

void find_in_torch(void) {
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch != NULL) {
        *(void **)&answers.torch_task = dlsym(torch, "_ZN5torch8autograd25get_current_graph_task_idEv");
        *(void **)&answers.torch_grad = dlsym(torch, "_ZN3c108GradMode10is_enabledEv");
        *(void **)&answers.torch_sequence = dlsym(torch, "_ZN2at15sequence_number4peekEv");
        dlclose(torch); /* it stays loaded, as torch holds it */
    }
}

static int number_from(PyObject *question, long long *answer) {
    PyObject *result = call_held(question);
    if (result == NULL) {
        return -1;
    }
    *answer = PyLong_AsLongLong(result);
    Py_DECREF(result);
    return *answer == -1 && PyErr_Occurred() ? -1 : 0;
}

int ask_task(long long *task) {
    if (answers.torch_task != NULL) {
        *task = answers.torch_task();
        return 0;
    }
    return number_from(answers.task, task);
}

int ask_sequence(uint64_t *sequence) {
    if (answers.torch_sequence != NULL) {
        *sequence = answers.torch_sequence();
        return 0;
    }
    long long number = 0;
    int done = number_from(answers.sequence, &number);
    *sequence = (uint64_t)number;
    return done;
}

int ask_grad(void) {
    if (answers.torch_grad != NULL) {
        return answers.torch_grad();
    }
    PyObject *result = call_held(answers.grad);
    int truth = result == NULL ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(result);
    return truth;
}

int import_frames(void) {
    if (answers.grad_nodes != NULL) {
        return 0;
    }
    PyObject *frames = PyImport_ImportModule("nvprof_kit._instrument.ranges.frames");
    if (frames != NULL && answers.grad_nodes == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "nvprof_kit._instrument.ranges.frames did not call follow()");
    }
    Py_XDECREF(frames);
    return answers.grad_nodes == NULL ? -1 : 0;
}
