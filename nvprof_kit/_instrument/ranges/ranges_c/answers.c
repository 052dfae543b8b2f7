/* Saving errors, and queries about the calling thread. */
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

PyObject *call_held_with(PyObject *function, PyObject *argument) {
    Py_INCREF(function);
    PyObject *result = PyObject_CallOneArg(function, argument);
    Py_DECREF(function);
    return result;
}

static int number_from(const Query *query, long long *answer) {
    PyObject *result = call_query(query);
    if (result == NULL) {
        return -1;
    }
    *answer = PyLong_AsLongLong(result);
    Py_DECREF(result);
    return *answer == -1 && PyErr_Occurred() ? -1 : 0;
}

int ask_task(long long *task) {
    return number_from(&answers.task, task);
}

int ask_sequence(uint64_t *sequence) {
    long long number = 0;
    int done = number_from(&answers.sequence, &number);
    *sequence = (uint64_t)number;
    return done;
}

int ask_grad(void) {
    if (answers.grad_mode != NULL) {
        return answers.grad_mode();
    }
    PyObject *result = call_query(&answers.grad);
    int truth = result == NULL ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(result);
    return truth;
}
